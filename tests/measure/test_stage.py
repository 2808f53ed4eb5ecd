"""The stage's measures together: on a CPU what needs no other side, on a device everything against a twin in a real child process.

An engine that computes in bfloat16 on the CPU plays the device: what is compared, named and refused does not depend on where it ran. What these tests do
not show is a GPU's kernels and the profiler's kernel times.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lab.admission import refusal_of
from lab.artifacts import open_model
from lab.cell import Placement
from lab.engines.local import LocalEngine
from lab.measure import stage
from lab.measure.passages import nll_metric, passages_nll
from lab.measure.products import products, random_outputs, verify_metric
from lab.measure.stage import STAGE, TWO_SIDED, Found, rel_diff, stage_measures
from lab.measure.text import Corpus, load_corpus
from lab.measure.twin import Side, one_side, run_twin, twin_cell
from lab.record import Status, WorkerResult
from tests.measure.stage_models import cell, engine, hf_qwen3, write

MODEL = hf_qwen3(seed=4)


@pytest.fixture(scope="module", autouse=True)
def one_core() -> Iterator[None]:
    """Products this small only make threads wait for each other; a child takes as many as it has cores."""
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    write(MODEL, path)
    return path


@pytest.fixture(scope="module")
def twin(folder: Path) -> tuple[Side, dict[str, Tensor]]:
    """What a real child process found on the CPU."""
    return run_twin(cell(folder, "bfloat16"), folder)


def _corpus(folder: Path) -> Corpus:
    return load_corpus(open_model(folder, cell(folder).model).tokenizer(), folder / "text.txt")


def _told(phases: list[str]) -> Callable[[str, str], None]:
    return lambda name, detail: phases.append(f"{name}: {detail}")


def test_on_a_cpu_two_metrics_are_measured_and_the_others_say_why_not(folder: Path) -> None:
    phases: list[str] = []
    found = stage_measures(engine(folder), cell(folder), folder, _corpus(folder), _told(phases))
    assert set(found.metrics) == {"corpus_nll_mean", "gemm_share"}
    assert set(found.gaps) == set(TWO_SIDED)
    assert all(status is Status.UNSUPPORTED and "the device is the CPU" in reason for status, reason in found.gaps.values())
    assert len(phases) == 2


@pytest.fixture
def as_a_device(folder: Path) -> LocalEngine:
    """An engine that says it is on a GPU wherever the stage asks which side it is; its products in layer 1's down_proj are a fifth too large."""
    loaded = engine(folder, "bfloat16")
    (product,) = (p for p in products(loaded.model) if p.name == "layers.1.mlp.down_proj")
    true: Callable[[Tensor], Tensor] = getattr(product.owner, product.attribute)
    setattr(product.owner, product.attribute, lambda x: 1.2 * true(x))
    return loaded


def test_a_device_with_one_wrong_matrix_against_its_twin(
    folder: Path, as_a_device: LocalEngine, twin: tuple[Side, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "run_twin", lambda *_: twin)
    found = Found()
    found.attempt(TWO_SIDED, lambda: stage._against_cpu(as_a_device, cell(folder, "bfloat16"), folder, _corpus(folder), _told([])))
    assert set(found.metrics) == set(TWO_SIDED), found.gaps
    metrics = found.metrics
    assert not [refusal_of(name, m, WorkerResult(status=Status.OK)) for name, m in metrics.items() if refusal_of(name, m, WorkerResult(status=Status.OK))]
    assert all(m.details["definition"] for m in metrics.values())
    verify = metrics["verify_max_rel_err"]
    assert verify.details["above_tolerance"] == ["layers.1.mlp.down_proj"]
    assert metrics["nll_rel_diff"].value > 1e-4
    assert metrics["greedy_match_tokens"].value < metrics["greedy_compared_tokens"].value == 128
    for name, phase in (("prefill_multiple", "prefill"), ("decode_multiple", "decode"), ("end_to_end_multiple", "end to end")):
        details = metrics[name].details
        assert phase in details["definition"]
        assert len(details["cpu_seconds"]) == len(details["device_seconds"]) == 5
        assert metrics[name].value == pytest.approx(statistics.median(details["cpu_seconds"]) / statistics.median(details["device_seconds"]))
        assert details["cpu"]["compute_dtype"] == "float32"
        assert details["device"]["compute_dtype"] == "bfloat16"


def test_the_twin_of_a_right_device_gives_the_same(folder: Path, twin: tuple[Side, dict[str, Tensor]]) -> None:
    corpus, loaded, (side, outputs) = _corpus(folder), engine(folder), twin
    ours = one_side(loaded, corpus, 1, 5)
    assert [one.ids for one in side.greedy] == [one.ids for one in ours.greedy]
    assert rel_diff(nll_metric(side.nll, corpus), nll_metric(ours.nll, corpus)).value < 1e-6
    assert verify_metric(outputs, random_outputs(loaded), torch.float32).value < 1e-5
    total = [a + b for a, b in zip(ours.seconds["prefill"], ours.seconds["decode"], strict=True)]
    assert ours.seconds["end_to_end"] == pytest.approx(total)


def test_the_twin_keeps_the_files_and_drops_what_is_the_devices(folder: Path) -> None:
    given = cell(folder, "bfloat16").model_copy(update={"placement": Placement(host_budget_mb=1, slots=3), "mode": "eager"})
    twin = twin_cell(given)
    assert (twin.device.torch_device, twin.device.compute_dtype, twin.device.threads) == ("cpu", "float32", 0)
    assert (twin.placement, twin.mode) == (Placement(), "auto")
    assert (twin.model, twin.path, twin.layers, twin.bench) == (given.model, given.path, given.layers, given.bench)


def test_a_twin_that_cannot_run_leaves_gaps_of_one_line_and_the_other_metrics_alone(folder: Path, as_a_device: LocalEngine) -> None:
    corpus = _corpus(folder)
    lost = cell(folder).model_copy(update={"model": cell(folder).model.model_copy(update={"artifact": str(folder / "nowhere")})})
    found = Found(metrics={"corpus_nll_mean": nll_metric(passages_nll(as_a_device, corpus), corpus)})
    found.attempt(TWO_SIDED, lambda: stage._against_cpu(as_a_device, lost, folder, corpus, _told([])))
    assert set(found.metrics) == {"corpus_nll_mean"}
    status, reason = found.gaps["decode_multiple"]
    assert status is Status.INFRA
    assert "nowhere" in reason
    assert "\n" not in reason


def test_a_model_that_gives_nan_has_gaps_and_no_number(folder: Path) -> None:
    loaded = engine(folder)
    true = loaded.model.head
    loaded.model.head = lambda x: true(x) * float("nan")
    found = stage_measures(loaded, cell(folder), folder, _corpus(folder), _told([]))
    assert found.gaps["corpus_nll_mean"][0] is Status.NUMERIC_INVALID
    assert "corpus_nll_mean" not in found.metrics
    assert set(found.metrics) | set(found.gaps) == set(STAGE)
