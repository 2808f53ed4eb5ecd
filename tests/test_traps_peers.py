"""One test for each trap that reading other benchmarks' source turned up and that could happen here: peers notes, section 1b, by their numbers there.

Each test shows that the lab's protection fires; none shows that the same mistake cannot be made in another way. Of the sixteen, trap 2 (a watcher
that polls the GPU's processes and may signal the wrong one) does not apply: the lab signals only the group that it started, and looks at other
processes before and after, not by polling. Trap 16 is tested with 4: both are prefill time inside a decode rate. Traps 13, 14 and the part of 10
that is about MLflow are in `test_traps_peers_mlflow`.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab import provenance
from lab.admission import decide
from lab.child import run_child
from lab.codecs import create, verify_encoding
from lab.errors import LabError
from lab.matrix import build_matrix
from lab.measure import throughput
from lab.measure.text import Corpus
from lab.metrics import CORE, METRICS
from lab.project import Project
from lab.record import Measurement, Status, WorkerResult
from lab.report.build import build_report
from lab.report.language import load_language
from lab.signals import StopSignals
from lab.store import RECORD, Store
from tests import matrix_helpers
from tests.runner_helpers import cell_of, lab, make_project
from tests.trap_helpers import SlowPrefill, codecs_of, counted, nano_attempt, records, sweep

CELL = ("path=expert_q2", "layers=3")
RATES = {name for name, metric in METRICS.items() if metric.unit == "tok/s" and not metric.optional}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "p"))
    return make_project(tmp_path / "p")


@pytest.mark.parametrize("before", ["pass", "[os.close(fd) for fd in (1, 2, int(sys.argv[-1]))]"], ids=["quiet child", "child that closed its pipes"])
def test_trap_1_the_parent_sleeps_while_the_child_measures(tmp_path: Path, before: str) -> None:
    """Trap 1 (optimum-benchmark): the parent spins on a core beside the measurement. Here it sleeps in one select, also when a pipe has ended."""
    argv = (sys.executable, "-c", f"import os, sys, time; {before}; time.sleep(1.5)")
    with StopSignals() as stop:
        used = time.process_time()
        outcome = run_child(argv, {}, cwd=tmp_path, log=tmp_path / "log", timeout_s=60, stop=stop, on_phase=lambda *_: None)
        used = time.process_time() - used
    assert outcome.exit_code == 0 and outcome.elapsed_s > 1.5
    assert used < 0.3, f"{used:.2f} s of CPU time for waiting"


def test_trap_3_only_the_same_cell_and_key_is_skipped_and_a_crash_is_recorded(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 3 (optimum-benchmark): "a report file exists" counts as done, and a crash leaves none. Here hash and resume key decide; a crash has a record."""
    monkeypatch.chdir(project.root)
    store, three, six = Store(project.runs), cell_of(project, *CELL), cell_of(project, "path=expert_q2", "layers=6")
    assert sweep(project, *CELL) == sweep(project, *CELL) == 0
    (first,) = store.records()
    misplaced = project.runs / six.id / "001"
    misplaced.mkdir(parents=True)
    for folder in (misplaced, project.root):
        shutil.copy(first.file, folder / RECORD)
    assert sweep(project, "path=expert_q2", "layers=6") == 0
    newest = store.newest(six)
    assert newest is not None and newest.record.attempt == 2, "another cell's record in its place was taken for its own"

    first.file.write_text(first.record.model_copy(update={"resume_key": "of another day"}).model_dump_json())
    monkeypatch.setenv("FAKE_MODE", "die")
    assert sweep(project, *CELL) == 3
    assert [(one.record.attempt, one.record.status) for one in store.read(three.id)[0]] == [(1, Status.OK), (2, Status.CRASHED)]


@settings(deadline=None, max_examples=15)
@given(prefill_s=st.floats(1e-4, 1e3), step_s=st.floats(1e-4, 1.0), lanes=st.sampled_from([1, throughput.LANES]))
def test_traps_4_and_16_decoding_holds_no_prefill_and_is_timed_directly(prefill_s: float, step_s: float, lanes: int) -> None:
    """Traps 4 (optimum-benchmark: a difference of two means, down to -744 tok/s; samples for tokens) and 16 (gpt-fast: prefill inside tokens/s)."""
    engine = SlowPrefill(prefill_s, step_s)
    text = Corpus(torch.arange(5000) % 7, None, {"name": "t"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: engine.now))
        decode, _ = throughput.decode_rate(engine, text, lanes, 1, 5, None)
        prefill = throughput.prefill_rate(engine, text, 1, 5, None)
    assert decode.samples == pytest.approx([lanes / step_s] * 5, rel=1e-6), "tokens of all lanes over the steps' own time"
    assert prefill.samples == pytest.approx([throughput.PREFILL / prefill_s] * 5, rel=1e-6), "tokens, not prompts, per second"


def test_trap_5_a_spread_is_one_processs_and_says_so(tmp_path: Path) -> None:
    """Trap 5 (llama-bench): ± is the spread inside one process and reads like that of restarts. Here restarts are never pooled, and the report says it."""
    cell = matrix_helpers.cell()
    before, after = (
        matrix_helpers.record(cell, {"pp512_tok_s": matrix_helpers.measured("pp512_tok_s", value)}, attempt=n) for n, value in enumerate((100.0, 140.0), 1)
    )
    matrix = build_matrix(matrix_helpers.small(tmp_path), [before, after], matrix_helpers.compose)
    shown = next(entry.measurement for entry in matrix.entries.values() if entry.measurement is not None)
    assert shown == after.metrics["pp512_tok_s"] and shown.min is not None and shown.min > 130
    for language, sentence in (("en", "restart-to-restart noise is not in them"), ("zh", "不含重启之间的噪声")):
        report, *_ = build_report(matrix, tmp_path / language, load_language(language))
        assert sentence in report.read_text(encoding="utf-8")


def test_trap_6_a_text_shorter_than_a_window_is_an_error_and_no_sentinel(tmp_path: Path) -> None:
    """Trap 6 (llama-perplexity): too short an input comes back as the number 0 or -1. Here it ends the attempt, naming the text and both lengths."""
    text = tmp_path / "short.txt"
    text.write_text("far too short")
    result = nano_attempt(tmp_path, f"model.corpus={text}")
    assert result.status is Status.LOAD_FAILED and "short.txt" in result.reason and "fewer than one window of bench.ppl_context=32" in result.reason
    assert not result.metrics.keys() & {"ppl", "bits_per_byte"}
    just_enough = Corpus(torch.arange(32), None, {"name": "t"})
    windows, scored = just_enough.windows(32, 16, 9)
    assert windows.tolist() == [list(range(32))] and scored.sum() == 31, "no BOS in the first token's place, and every other token scored"


def test_trap_7_an_empty_list_of_samples_is_never_zero(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 7 (vLLM, InferenceX, guidellm): percentiles of nothing are 0, so a total failure looks like perfect latency. Here nothing measured is a gap."""
    with pytest.raises(ValueError, match="needs finite samples"):
        Measurement.from_samples([], "tok/s", "tg@1")
    with pytest.raises(LabError, match=r"bench.repeats=0"):
        cell_of(project, *CELL, "bench.repeats=0")
    monkeypatch.setenv("FAKE_MODE", "nothing-answered")
    assert sweep(project, *CELL) == 3
    (record,) = records(project)
    assert record.status is Status.IMPLAUSIBLE and not record.metrics
    assert record.gaps.keys() >= RATES and "a measurement that did not happen" in record.reason


@pytest.mark.parametrize("package", ["torch", "triton", "numpy", "tokenizers"])
def test_trap_8_another_version_under_the_engine_is_measured_again(project: Project, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Trap 8 (vLLM's sweep): an output file is reused whatever the engine's version. Here versions that move numbers are in the resume key."""
    versions = {name: "1.0" for name in provenance.PACKAGES}
    monkeypatch.setattr(provenance, "_version", versions.get)
    for changed, attempts in ((None, 1), (package, 2), (None, 2), ("mlflow", 2)):
        versions |= {changed: "1.1"} if changed else {}
        assert sweep(project, *CELL) == 0
        assert len(records(project)) == attempts, f"after a change of {changed}"


def test_trap_9_a_missing_text_is_an_error_and_a_missing_metric_a_row(project: Project, tmp_path: Path) -> None:
    """Trap 9 (SGLang): a missing prompt file falls back to default inputs, and a skipped shape leaves no row."""
    result = nano_attempt(tmp_path, f"model.corpus={tmp_path / 'gone.txt'}")
    assert result.status is Status.LOAD_FAILED and "gone.txt: no such file (model.corpus)" in result.reason and not result.metrics
    code, out, _ = lab(project, "run", *CELL, "device=cpu", FAKE_MODE="forgetful")
    (record,) = records(project)
    assert code == 0 and record.metrics.keys() | record.gaps.keys() == set(CORE)
    assert (record.gaps["pp512_tok_s"].status, record.gaps["pp512_tok_s"].reason) == (Status.NOT_RUN, "the worker neither measured it nor said why")
    (row,) = (line for line in out.splitlines() if METRICS["pp512_tok_s"].title in line)
    assert "GAP" in row and "NOT_RUN" in row


def test_trap_10_a_path_without_code_saves_no_success(project: Project) -> None:
    """Trap 10 (ktransformers): the bench prints "not implemented" and reports its results saved. Here it is a recorded gap and exit code 3."""
    code, out, _ = lab(project, "run", *CELL, "device=cpu", "+path.unsupported='not written yet'")
    (record,) = records(project)
    assert (code, record.status, record.reason) == (3, Status.UNSUPPORTED, "not written yet")
    assert "every metric is a gap: UNSUPPORTED: not written yet" in out and not record.provenance.get("worker")


def test_trap_10_an_exit_code_that_denies_the_result_counts(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 10 (ktransformers): exit codes of children are ignored. Here a child that reports OK and then fails has failed."""
    monkeypatch.setenv("FAKE_MODE", "bad-end")
    assert sweep(project, *CELL) == 3
    (record,) = records(project)
    assert record.status is Status.CRASHED and "reported OK and then ended with exit code 7" in record.reason


@pytest.mark.parametrize("where", [0, 2, "trunk"])
def test_trap_11_a_silent_drop_to_an_older_variant_is_seen(project: Project, where: int | str) -> None:
    """Trap 11 (ktransformers): an older CPU variant is chosen with a debug line at most. Here one layer or component by another operation is enough."""
    cell = cell_of(project, *CELL)
    evidence = counted(cell, codecs_of(cell))
    for op in evidence["ops"]:
        if (op["layer"], op["component"]) == (where, "experts") or op["component"] == where:
            op["op"] = "q2_levels"
    numbers = {"ppl": Measurement(value=9.5, unit="ppl", protocol="ppl/window@1")}
    decision = decide(cell, WorkerResult(status=Status.OK, metrics=numbers, evidence=evidence))
    assert decision.status is Status.PATH_NOT_EXECUTED and "q2_levels ran where only" in decision.reason and not decision.metrics


@pytest.mark.parametrize("mode", ["silent", "vanish", "die"])
def test_trap_12_whatever_ends_a_worker_ends_neither_record_nor_sweep(project: Project, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Trap 12 (Hydra): SystemExit, os._exit and SIGKILL escape `run_job`, or end the sweep. Here each is a record, and the next cell runs."""
    monkeypatch.setenv("FAKE_MODE", f"{mode}-q2")
    assert sweep(project, "path=expert_q2,reference", "layers=3") == 3
    assert [(r.cell["path"]["name"], r.status) for r in records(project)] == [("expert_q2", Status.CRASHED), ("reference", Status.OK)]
    assert not records(project)[0].metrics


@pytest.mark.parametrize("ci", [None, "1"])
def test_trap_15_lost_parity_is_fatal_in_ci_too(project: Project, monkeypatch: pytest.MonkeyPatch, ci: str | None) -> None:
    """Trap 15 (flash-linear-attention): in CI a failed comparison is a warning. Here no environment variable softens one."""
    for name in ("CI", "FLA_CI_ENV", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)
        if ci is not None:
            monkeypatch.setenv(name, ci)
    monkeypatch.setenv("FAKE_MODE", "no-parity")
    assert sweep(project, *CELL) == 3
    (record,) = records(project)
    assert record.status is Status.PARITY_FAILED and not record.metrics
    codec, weight = create("q2_rows"), 0.01 * torch.randn(8, 160)
    parts = codec.encode(weight)
    with pytest.raises(LabError, match="does not decode to its weight"):
        verify_encoding(codec, parts | {"scale": torch.ones_like(parts["scale"])}, weight).require("table")
