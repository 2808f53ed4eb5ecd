"""The CPU twin of a device's cell: the same files along the same path on this machine's CPU, in a process of its own.

`python -m lab.measure.twin` reads the cell from standard input and leaves what it found in a folder. Likelihoods, greedy ids and times are taken by the same
functions on both sides (`one_side`), so that a multiple compares like with like. The twin computes in float32 while the device waits, with as many of the
cores as are soonest (lab.engines.threads). A multiple says how much faster this device is than this CPU with the lab's own kernels, and nothing about another
CPU or engine.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lab.artifacts import open_model
from lab.cell import Cell, DeviceSpec, Placement
from lab.engines.local import LocalEngine, is_out_of_memory
from lab.errors import GapError, LabError, flat
from lab.measure.greedy import Continuation, continuations
from lab.measure.passages import passages_nll
from lab.measure.products import random_outputs
from lab.measure.text import Corpus, load_corpus
from lab.measure.throughput import DECODE, PREFILL, WARM
from lab.metrics import METRICS
from lab.provenance import machine
from lab.record import Measurement, Status

_OUT_OF_MEMORY = 9
"""Exit code of the twin when the model does not fit this machine's memory."""

_MULTIPLES = {"prefill_multiple": "prefill", "decode_multiple": "decode", "end_to_end_multiple": "end_to_end"}


@dataclass(frozen=True)
class Side:
    """What is measured alike on both sides. `seconds`: {prefill, decode, end_to_end}, one entry per repeat; `facts`: what computed it."""

    nll: list[list[float]]
    greedy: list[Continuation]
    seconds: dict[str, list[float]]
    facts: dict[str, Any]


def twin_cell(cell: Cell) -> Cell:
    """The same cell on the CPU: float32, as many cores as are soonest. Budgets go: they are the device's; strip caches would slow the CPU down and flatter the
    device."""
    device = DeviceSpec(name="cpu", torch_device="cpu", compute_dtype="float32")
    return cell.model_copy(update={"device": device, "mode": "auto", "placement": Placement()})


def run_seconds(engine: LocalEngine, corpus: Corpus, warmup: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of PREFILL tokens into an empty state, of DECODE steps after them (the text's own tokens are fed, the greedy choice is taken inside), and of both
    on one clock; `repeats` runs after `warmup`, each on other text."""
    found: dict[str, list[float]] = {"prefill": [], "decode": [], "end_to_end": []}
    for run in range(warmup + repeats):
        text = corpus.prompts(1, PREFILL + DECODE, offset=run)
        state = engine.new_state(1, PREFILL + DECODE)
        engine.synchronise()
        started = time.perf_counter()
        engine.logits(text[:, :PREFILL], state, last_only=True).argmax(-1)
        engine.synchronise()
        between = time.perf_counter()
        for position in range(PREFILL, PREFILL + DECODE):
            engine.logits(text[:, position : position + 1], state, last_only=True).argmax(-1)
            engine.synchronise()
        ended = time.perf_counter()
        if run >= warmup:
            for name, seconds in (("prefill", between - started), ("decode", ended - between), ("end_to_end", ended - started)):
                found[name].append(seconds)
    return found


def one_side(engine: LocalEngine, corpus: Corpus, warmup: int, repeats: int) -> Side:
    """Everything of one side. Raises ValueError when a number of the model is not finite, LabError for too short a text."""
    device = engine.device
    facts = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else machine()["cpu"],
        "compute_dtype": str(engine.dtype).removeprefix("torch."),
        "threads": engine.threads.facts(),
        "kernels": dict(engine.binder.kernels),
    }
    return Side(passages_nll(engine, corpus), continuations(engine, corpus), run_seconds(engine, corpus, warmup, repeats), facts)


def multiples(cpu: Side, device: Side) -> dict[str, Measurement]:
    """{prefill, decode, end_to_end}_multiple: the CPU's median time over the device's."""
    found = {}
    for name, phase in _MULTIPLES.items():
        ours, theirs = statistics.median(device.seconds[phase]), statistics.median(cpu.seconds[phase])
        details = {
            "definition": f"median seconds on the CPU / median seconds on the device, {phase.replace('_', ' ')}, same text and lengths on both",
            "prefill_tokens": 0 if phase == "decode" else PREFILL,
            "decode_tokens": 0 if phase == "prefill" else DECODE,
            "cpu_seconds": cpu.seconds[phase],
            "device_seconds": device.seconds[phase],
            "lowest": min(cpu.seconds[phase]) / max(device.seconds[phase]),
            "highest": max(cpu.seconds[phase]) / min(device.seconds[phase]),
            "cpu": cpu.facts,
            "device": device.facts,
            "cache_state": WARM,
        }
        found[name] = Measurement(value=theirs / ours, unit=METRICS[name].unit, protocol=METRICS[name].protocol, details=details)
    return found


def run_twin(cell: Cell, root: Path) -> tuple[Side, dict[str, Tensor]]:
    """(what the CPU measured, the outputs of its matrices), from a child process. Raises GapError when that fails."""
    with tempfile.TemporaryDirectory(prefix="lab-twin-") as folder:
        job = json.dumps({"cell": twin_cell(cell).model_dump(mode="json"), "root": str(root), "out": folder})
        done = subprocess.run([sys.executable, "-m", "lab.measure.twin"], input=job, text=True, stdout=sys.stderr, stderr=subprocess.PIPE, check=False)
        sys.stderr.write(done.stderr)
        last = flat((done.stderr.strip().splitlines() or ["no message"])[-1])
        if done.returncode == _OUT_OF_MEMORY:
            raise GapError(Status.OOM, f"the CPU side of the comparison does not fit: {last}")
        if done.returncode:
            raise GapError(Status.INFRA, f"the CPU side of the comparison failed with exit code {done.returncode}: {last}")
        side = json.loads((Path(folder) / "side.json").read_text())
        outputs = load_file(Path(folder) / "products.safetensors")
    return Side(side["nll"], [Continuation(**one) for one in side["greedy"]], side["seconds"], side["facts"]), outputs


def make_twin(cell: Cell, root: Path, out: Path) -> None:
    """Loads the cell on the CPU, measures, and writes side.json and products.safetensors into `out`."""
    corpus = load_corpus(open_model(root, cell.model).tokenizer(), root / cell.model.corpus)
    engine = LocalEngine(cell, root)
    engine.settle_threads()
    outputs = random_outputs(engine)
    side = one_side(engine, corpus, cell.bench.warmup, cell.bench.repeats)
    save_file(outputs, out / "products.safetensors")
    (out / "side.json").write_text(json.dumps(asdict(side)))


def main() -> int:
    """Reads a job from standard input: {cell, root, out}."""
    job: dict[str, Any] = json.load(sys.stdin)
    try:
        make_twin(Cell.model_validate(job["cell"]), Path(job["root"]), Path(job["out"]))
    except (LabError, GapError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return _OUT_OF_MEMORY
    return 0


if __name__ == "__main__":
    sys.exit(main())
