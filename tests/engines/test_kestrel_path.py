"""The story of the 8B stage on a small model: a 0x1 file is refused and recorded, the printed command lays it out anew, and the same cell then runs."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.admission import decide
from lab.artifacts.vqf import VqfArtifact
from lab.codecs import parts_nbytes
from lab.codecs.vqf import VQF_CODECS, in_rows
from lab.compose import compose_cells
from lab.engines.local import LocalEngine
from lab.engines.local_attempt import LocalAttempt
from lab.kernels import native
from lab.preflight import clear, inspect_artifacts
from lab.project import Project
from lab.record import Status, WorkerResult
from tests.artifacts.test_vqf_engine import with_weights_of
from tests.artifacts.vqf_files import one_thread  # noqa: F401
from tests.engines.kestrel_helpers import kestrel_project, small_model
from tests.runner_helpers import ROOT, python_path

SHORT = ("bench.ppl_context=48", "bench.ppl_stride=24", "bench.ppl_windows=2", "device.threads=1")


def lab(project: Project, *words: str) -> tuple[int, str, str]:
    """The real `python -m lab`, with its own MLflow store turned to a place that cannot be: a record must do without."""
    settings = {"LAB_ROOT": str(project.root), "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "LAB_NATIVE_CACHE": str(ROOT / ".cache" / "native")}
    environment = {**os.environ, **settings, "MLFLOW_TRACKING_URI": f"sqlite:///{project.root}/no/such/folder/mlflow.db"}
    command = [sys.executable, "-m", "lab", *words]
    done = subprocess.run(command, env=environment, cwd=project.root, capture_output=True, text=True, timeout=240, check=False)
    return done.returncode, done.stdout, done.stderr


def records(project: Project) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(project.runs.glob("*/*/record.json"), key=lambda file: file.stat().st_mtime_ns)]


def test_refused_converted_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, file = kestrel_project(tmp_path, layout="0x1")
    words = ["model=qwen3_2b", "path=kestrel_vqf", "device=cpu", "bench=quick", *SHORT]
    code, _, told = lab(project, "run", *words, "artifact=models/m.vqf")
    (refused,) = records(project)
    assert code == 3 and refused["status"] == "ARTIFACT_REFUSED" and not refused["metrics"]
    assert "bit 1  Q4_4X4    DIFFERS: the file says 4-bit matrices in rows; the engine expects 4-bit matrices in 4x4 tiles" in told
    assert "bit 0  Q8_8X8    same" in told
    command = refused["reason"].partition("convert the file: ")[2]
    assert command == f"python -m lab convert ./{file.relative_to(project.root)} OUT --to vqf --layout 0x3" and command in told
    code, said, _ = lab(project, *shlex.split(command)[3:])
    assert code == 0 and "layout 0x1 -> 0x3" in said and "lossless" in said
    (cell,) = compose_cells([*words, "artifact=OUT/model.vqf"], project)
    assert clear(project, cell, False, inspect_artifacts(project, [cell])[cell.hash]).stop is None
    monkeypatch.setattr("lab.measure.machine.machine_bounds", lambda *_: None)
    events = io.StringIO()
    LocalAttempt(cell, project.root, tmp_path / "cache", events).run()
    ran = WorkerResult.model_validate(json.loads(events.getvalue().splitlines()[-1])["result"])
    decision = decide(cell, ran)
    assert decision.status is Status.OK, decision.reason
    assert {"pp512_tok_s", "tg128_tok_s", "decode_bytes_per_token", "resident_bytes"} <= decision.metrics.keys()
    assert ran.artifact["flags"] == 0x23 and ran.evidence["source_codecs"]["trunk"] == ["vqf:Q4_0"]
    kind = "torch" if native.unavailable() else "native"
    assert all(name.startswith(kind) for name in ran.evidence["kernels"]["trunk: vqf:Q4_0 on cpu"]), ran.evidence["kernels"]


@torch.no_grad()
@pytest.mark.parametrize(("mixture", "options"), [(False, {"wmode": "q8"}), (False, {"wmode": "q4"}), (True, {"wmode": "q4"}), (True, {"wmode": "q8"})])
def test_logits_are_transformers_through_native_rows_of_tiled_files(tmp_path: Path, mixture: bool, options: dict[str, Any]) -> None:
    project, file = kestrel_project(tmp_path, mixture, **options)
    (cell,) = compose_cells([f"model={'qwen3_30b_a3b' if mixture else 'qwen3_2b'}", "path=kestrel_vqf", "artifact=models/m.vqf", "device=cpu"], project)
    assert cell.layers == 3
    engine = LocalEngine(cell, project.root)
    ids = torch.randint(0, 2560, (2, 37), generator=torch.Generator().manual_seed(5))
    theirs = with_weights_of(small_model(mixture, 11), VqfArtifact(file))(ids).logits
    assert float((engine.logits(ids) - theirs).abs().max()) < 1e-4 and float(theirs.std()) > 0.01
    packed = sum(entry.nbytes for name, entry in VqfArtifact(file).file.entries.items() if name.startswith(options["wmode"]))
    assert sum(entry["bytes"] for entry in engine.binder.resident() if entry["component"] in ("trunk", "experts", "head")) == packed
    assert not any("X" in name for names in engine.binder.source_codecs.values() for name in names), "tiles lie in rows"


@pytest.mark.parametrize("name", list(VQF_CODECS))
def test_tiles_become_rows_that_native_kernels_decode_bit_for_bit(name: str) -> None:
    codec, weight = VQF_CODECS[name](), torch.randn(3, 24, 512, generator=torch.Generator().manual_seed(9))
    parts = codec.encode(weight)
    rows, moved = in_rows(codec, parts)
    assert torch.equal(rows.decode(moved, 512), codec.decode(parts, 512)) and parts_nbytes(moved) == parts_nbytes(parts)
    assert native.supports(rows, 512) and native.supports(codec, 512) == (codec.tile is None)
    if not native.unavailable():
        assert torch.equal(native.decode(rows, moved, 512), codec.decode(parts, 512))


def test_a_file_of_another_layout_still_tells_its_depth_and_only_a_vqf_file_is_taken(tmp_path: Path) -> None:
    project, _ = kestrel_project(tmp_path, layout="0x0")
    words = ["model=qwen3_2b", "path=kestrel_vqf", "device=cpu"]
    (cell,) = compose_cells([*words, "artifact=models/m.vqf"], project)
    assert cell.layers == 3 and inspect_artifacts(project, [cell])[cell.hash]["refused"]["lines"]
    (folder,) = compose_cells([*words, "artifact=models/hf"], project)
    stop = clear(project, folder, force=False).stop
    assert stop is not None and stop[0] is Status.UNSUPPORTED and "path=kestrel_vqf runs VQF files, and models/hf is none" in stop[1]
    (nano,) = compose_cells(["model=nano", "path=kestrel_vqf", "device=cpu", "layers=3"], project)
    assert clear(project, nano, force=False).stop == (Status.UNSUPPORTED, "VQF files hold models of the qwen3 family, not qwen4_exp")
