"""The reference path's log-probabilities for one artifact, depth and text, made once and kept as a file.

`python -m lab.measure.reference` runs as a process of its own, so that neither its memory nor its warm caches touch the measured path. It scores the
windows twice with different batch shapes; the difference is the noise floor that every divergence is read against. The file's name is a digest of
everything that would change its content.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lab.artifacts import open_model
from lab.cell import COMPONENTS, Cell, ComponentPlan
from lab.engines.local import LocalEngine, is_out_of_memory
from lab.errors import GapError, LabError
from lab.measure.divergence import MAX_WINDOWS, DivergenceTally
from lab.measure.scoring import score_windows
from lab.measure.text import Corpus, load_corpus
from lab.provenance import code_sha256, machine
from lab.record import Status

_OUT_OF_MEMORY = 9
"""Exit code of the reference pass when the model does not fit."""

BATCH, OTHER_BATCH = 4, 1
"""Windows per forward pass in every path's scoring, and in the reference's second pass."""

SOURCE_PLAN = {name: ComponentPlan(codec="source") for name in COMPONENTS}


def reference_key(cell: Cell, artifact_sha256: str, corpus: Corpus) -> str:
    """Digest of what the log-probabilities depend on."""
    bench = cell.bench
    parts = {
        "artifact": artifact_sha256,
        "corpus": corpus.facts["sha256"],
        "layers": cell.layers,
        "device": cell.device.model_dump(),
        "machine": [machine()["cpu"], machine()["cores"], machine()["accelerators"]],
        "windows": [bench.ppl_context, bench.ppl_stride, min(bench.ppl_windows, MAX_WINDOWS)],
        "code": code_sha256(),
        "torch": torch.__version__,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def is_its_own_reference(cell: Cell) -> bool:
    """Whether the local engine would compute the reference itself: then only another batch shape tells the two apart."""
    as_filed = all(plan.codec == "source" for plan in cell.path.components.values())
    return cell.engine == "local" and as_filed and not cell.model.source


def load_reference(cell: Cell, root: Path, cache: Path, artifact_sha256: str, corpus: Corpus) -> tuple[Tensor, dict[str, float]]:
    """(log-probabilities float32 [n, V], noise floor), computed in a child process when the cache has none. Raises GapError when that fails."""
    if cell.model.source:
        artifact_sha256 = _source_sha256(cell, root, corpus)
    path = cache / "reference" / f"{reference_key(cell, artifact_sha256, corpus)}.safetensors"
    if (kept := _read(path)) is not None:
        return kept
    job = json.dumps({"cell": cell.model_dump(mode="json"), "root": str(root), "out": str(path)})
    command = [sys.executable, "-m", "lab.measure.reference"]
    done = subprocess.run(command, input=job, text=True, stdout=sys.stderr, stderr=subprocess.PIPE, check=False)
    sys.stderr.write(done.stderr)
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    if done.returncode == _OUT_OF_MEMORY:
        raise GapError(Status.OOM, f"the source-precision reference does not fit: {last}")
    if done.returncode:
        raise GapError(Status.INFRA, f"the reference pass failed with exit code {done.returncode}: {last}")
    if (made := _read(path)) is None:
        raise GapError(Status.INFRA, "the reference pass wrote a file that cannot be read")
    return made


def _read(path: Path) -> tuple[Tensor, dict[str, float]] | None:
    """The cached file, or None where there is none or it is not whole (it is then made again)."""
    try:
        with safe_open(path, framework="pt") as handle:
            return handle.get_tensor("log_p"), json.loads((handle.metadata() or {})["noise_floor"])
    except FileNotFoundError:
        return None
    except (SafetensorError, OSError, KeyError, json.JSONDecodeError) as error:
        print(f"{path.name}: cached reference not readable ({error}); making it again", file=sys.stderr)
        return None


def _source_sha256(cell: Cell, root: Path, corpus: Corpus) -> str:
    """sha256 of the model that divergence is measured against. Raises GapError where it is not here, or reads the text as other tokens."""
    path = root / cell.model.source
    if not path.exists():
        raise GapError(Status.UNSUPPORTED, f"{cell.model.source} is not here: divergence is measured against the model before it was converted")
    try:
        source = open_model(root, cell.model, cell.model.source)
        theirs, found = load_corpus(source.tokenizer(), root / cell.model.corpus), source.inspect()
    except LabError as error:
        raise GapError(Status.UNSUPPORTED, f"no divergence from {cell.model.source}: {error}") from None
    if not torch.equal(theirs.ids, corpus.ids):
        raise GapError(Status.UNSUPPORTED, f"no divergence from {cell.model.source}: its tokenizer reads the text as other tokens than the artifact's")
    return str(found["sha256"])


def make_reference(cell: Cell, root: Path, out: Path) -> None:
    """Scores the windows with the source-precision model and writes the file, aside first."""
    model = cell.model
    files = model.source or model.artifact
    corpus = load_corpus(open_model(root, model, files).tokenizer(), root / model.corpus)
    engine = LocalEngine(cell, root, SOURCE_PLAN, files)
    bench = cell.bench
    windows, scored = corpus.windows(bench.ppl_context, bench.ppl_stride, min(bench.ppl_windows, MAX_WINDOWS))
    log_p = torch.cat([batch.cpu() for batch, _, _ in score_windows(engine.scores, windows, scored, BATCH)])
    floor = DivergenceTally(log_p)
    for batch, _, window in score_windows(engine.scores, windows, scored, OTHER_BATCH):
        floor.add(batch, window)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(f".{os.getpid()}.part")
    save_file({"log_p": log_p}, partial, metadata={"noise_floor": json.dumps(floor.summary())})
    partial.replace(out)


def main() -> int:
    """Reads a job from standard input: {cell, root, out}."""
    job: dict[str, Any] = json.load(sys.stdin)
    try:
        cell = Cell.model_validate(job["cell"])
        make_reference(cell, Path(job["root"]), Path(job["out"]))
    except (LabError, GapError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return _OUT_OF_MEMORY
    return 0


if __name__ == "__main__":
    sys.exit(main())
