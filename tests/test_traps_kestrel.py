"""One test for each fault that another project met while benchmarking and that could happen here: kestrel_vqf notes, section 6.

Faults 1, 6, 8, 16, 18, 19 and 21, by their numbers there. Each test shows that the lab's protection fires; none shows that the same mistake cannot be
made in another way. The other faults of that list are of shell harnesses, parsers and file formats that the lab does not have, or belong to the other
engines' own tests.
"""

from __future__ import annotations

import os
import shutil
from itertools import permutations
from pathlib import Path

import psutil
import pytest
from torch import Tensor

from lab import provenance
from lab.admission import decide
from lab.artifacts import open_artifact
from lab.engines.local import LocalEngine
from lab.measure import throughput
from lab.models.qwen4_exp.model import ModelState
from lab.project import Project
from lab.record import Measurement, Status, WorkerResult
from tests.runner_helpers import ROOT, cell_of, lab, make_project, python_path
from tests.trap_helpers import codecs_of, counted, nano_attempt, records, sweep

CELL = ("path=expert_q2", "layers=3")
ARMS = ("reference", "paiton_native", "ple_q2", "expert_q2", "expert_q2_levels")
NUMBERS = {
    "ppl": Measurement(value=9.5, unit="ppl", protocol="ppl/window@1"),
    "tg128_tok_s": Measurement.from_samples([50.0, 51.0, 49.0, 50.5, 49.5], "tok/s", "tg@1"),
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "p"))
    return make_project(tmp_path / "p")


def test_fault_1_no_identity_moves_with_times_or_memory(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 1: ids "differed" because the hash ran over ms and rss fields. Here cell hash, resume key and digests are made before anything is timed."""
    memory = psutil.virtual_memory()
    for mode, available in (("ok", memory.available), ("half-speed", memory.available // 3)):
        monkeypatch.setenv("FAKE_MODE", mode)
        reading = memory._replace(available=available, used=memory.total - available, percent=100 * (1 - available / memory.total))
        monkeypatch.setattr("psutil.virtual_memory", lambda reading=reading: reading)
        provenance.machine.cache_clear()
        sweep(project, *CELL, "force=true")
    first, second = records(project)
    assert first.metrics["tg128_tok_s"].value == 2 * second.metrics["tg128_tok_s"].value and "peak_memory_bytes" in second.metrics
    assert (first.cell_hash, first.resume_key, first.artifact) == (second.cell_hash, second.resume_key, second.artifact)

    weights = Path(shutil.copytree(ROOT / "experiments" / "nano", tmp_path / "weights"))
    before = open_artifact(weights, "qwen4_exp").inspect()["sha256"]
    for file in weights.iterdir():
        os.utime(file, (1e9, 1e9))
    assert open_artifact(weights, "qwen4_exp").inspect()["sha256"] == before
    (weights / "config.json").write_text((weights / "config.json").read_text() + "\n")
    assert open_artifact(weights, "qwen4_exp").inspect()["sha256"] != before


@pytest.mark.parametrize("mode", ["self-test", "empty"])
def test_fault_6_a_quick_exit_code_0_without_numbers_is_no_success(project: Project, mode: str) -> None:
    """Fault 6: an old binary met an unknown option, ran its self-test and returned 0 within 2 s. Here OK needs an admitted number, whatever was printed."""
    code, out, _ = lab(project, "run", *CELL, "device=cpu", FAKE_MODE=mode)
    (record,) = records(project)
    assert code == 3 and record.provenance["worker"]["exit_code"] == 0
    assert record.status is {"self-test": Status.CRASHED, "empty": Status.NOT_RUN}[mode] and not record.metrics
    assert f"every metric is a gap: {record.status}" in out
    if mode == "self-test":
        assert "without a result in phase load; last log line: self-test: 26 PASS, 0 FAIL" in record.reason


def test_fault_8_an_engine_that_died_midway_leaves_evidence_and_no_number(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 8: the engine died and turns of 0.86 s and 0.0005 s looked like results. Here what it had sent is kept, and none of it is admitted."""
    monkeypatch.setenv("FAKE_MODE", "die-late")
    assert sweep(project, *CELL) == 3
    (record,) = records(project)
    assert record.status is Status.CRASHED and "SIGSEGV in phase decode" in record.reason and "turn 2: 0.0005 s" in record.reason
    assert not record.metrics and {"ppl", "pp512_tok_s", "tg128_tok_s"} <= record.gaps.keys()
    kept = record.evidence["unadmitted_metrics"]
    assert kept.keys() == {"ppl", "pp512_tok_s"} and len(kept["pp512_tok_s"]["samples"]) == 5


@pytest.mark.parametrize(("claimed", "ran"), permutations(ARMS, 2))
def test_fault_16_an_arm_that_is_a_copy_of_another_is_not_admitted(project: Project, claimed: str, ran: str) -> None:
    """Fault 16: the "sparse" arm was pasted from another and its 407 ms were read as the cost of sparsity. Here an arm must have counted its own codecs."""
    mine, other = (cell_of(project, f"path={name}", "layers=3") for name in (claimed, ran))
    own = WorkerResult(status=Status.OK, metrics=NUMBERS, evidence=counted(mine, codecs_of(mine)))
    copied = own.model_copy(update={"evidence": counted(other, codecs_of(other))})
    assert decide(mine, own).status is Status.OK
    decision = decide(mine, copied)
    assert decision.status is Status.PATH_NOT_EXECUTED and not decision.metrics and set(decision.unadmitted) == set(NUMBERS)


@pytest.mark.parametrize("stale", [False, True])
def test_fault_18_other_code_in_the_root_than_the_record_names_is_no_result(project: Project, monkeypatch: pytest.MonkeyPatch, stale: bool) -> None:
    """Fault 18: a stale binary in the repository's root voided a whole A/B. Here the child says which code it ran, and the parent compares."""
    monkeypatch.setenv("PYTHONPATH", python_path())
    monkeypatch.setenv("FAKE_MODE", "code-found-here")
    if stale:
        shutil.copytree(ROOT / "lab", project.root / "lab", ignore=shutil.ignore_patterns("__pycache__"))
        with (project.root / "lab" / "errors.py").open("a") as file:
            file.write("# one line older\n")
    code = sweep(project, *CELL)
    (record,) = records(project)
    assert (code, record.status) == ((3, Status.INFRA) if stale else (0, Status.OK))
    if stale:
        assert "the code under lab/ changed" in record.reason and next(g for g in record.gates if g.gate == "identity").outcome == "stopped"


@pytest.mark.parametrize("arm", [name for name in ARMS if name != "reference"])
def test_fault_19_counters_identical_to_the_baseline_are_no_measurement(project: Project, arm: str) -> None:
    """Fault 19: the tested code returned early; the fingerprint was a counter identical to the baseline's. Here packed weights that nothing used do not do."""
    cell, baseline = (cell_of(project, f"path={name}", "layers=3") for name in (arm, "reference"))
    unused = counted(cell, codecs_of(baseline), resident=codecs_of(cell))
    untouched = counted(cell, codecs_of(cell))
    untouched["ops"] = [{**op, "calls": 0, "rows": 0} for op in untouched["ops"]]
    for evidence, sentence in ((unused, "bf16 ran where only"), (untouched, "operation was counted")):
        decision = decide(cell, WorkerResult(status=Status.OK, metrics=NUMBERS, evidence=evidence))
        assert decision.status is Status.PATH_NOT_EXECUTED and sentence in decision.reason and not decision.metrics


def test_fault_21_peak_memory_is_read_after_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 21: memory was sampled after prefill and missed 0.8 GiB that decoding took. Here the peak is read when everything has run."""
    gauge = {"peak": 1 << 30}
    forward = LocalEngine.logits

    def allocating(self: LocalEngine, ids: Tensor, state: ModelState | None = None, last_only: bool = False) -> Tensor:
        if ids.shape == (throughput.LANES, 1):
            gauge["peak"] += 1 << 20
        return forward(self, ids, state, last_only)

    monkeypatch.setattr(LocalEngine, "logits", allocating)
    monkeypatch.setattr(LocalEngine, "peak_memory_bytes", lambda _: gauge["peak"])
    monkeypatch.setattr(throughput, "DECODE", 4)
    result = nano_attempt(tmp_path)
    assert result.metrics["peak_memory_bytes"].value == (1 << 30) + 6 * 4 * (1 << 20), "1 warm-up and 5 repeats of 4 steps"
