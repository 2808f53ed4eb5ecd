"""The ledger against the real engine on nano: what it says lies where, is read and is computed, must be what the engine counts, to the byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lab.capacity import Ledger
from lab.capacity.build import STATE_BATCH, STATE_TOKENS, build, build_of_file
from lab.capacity.qwen4_exp import qwen4_exp_sizes
from lab.capacity.storage import stored
from lab.capacity.traffic import Pass, forward
from lab.cell import Cell
from lab.compose import compose_cells
from lab.engines.local import LocalEngine
from lab.measure.throughput import DECODE, PREFILL
from lab.project import Project
from tests.artifacts.gguf_models import hf_model, model_of
from tests.capacity.test_sizes import geometry
from tests.runner_helpers import ROOT

PROJECT = Project(root=ROOT, runs=ROOT / "runs")
NANO = ROOT / "experiments" / "nano"


PATHS = (("path=reference",), ("path=expert_q2_levels", "path.components.ple.codec=q2_rows"))


def nano(words: tuple[str, ...]) -> Cell:
    """Two layers of nano: the second has the table."""
    return compose_cells(["model=nano", "layers=2", "device=cpu", *words], PROJECT)[0]


@pytest.fixture(scope="module", params=PATHS, ids=" ".join)
def both(request: pytest.FixtureRequest) -> tuple[LocalEngine, Ledger]:
    cell = nano(request.param)
    return LocalEngine(cell, ROOT), build(cell, json.loads((NANO / "config.json").read_text()), "nano")


def test_bytes_and_weights_are_those_resident(both: tuple[LocalEngine, Ledger]) -> None:
    engine, ledger = both
    resident = {(e["component"], e["codec"]): (e["weights"], e["bytes"]) for e in engine.binder.resident()}
    assert {(line.component, line.codec): (line.weights, line.bytes) for line in ledger.lines} == resident


def test_a_decode_step_reads_and_computes_what_the_engine_counts(both: tuple[LocalEngine, Ledger]) -> None:
    engine, ledger = both
    context = PREFILL + DECODE // 2
    state = engine.new_state(1, context)
    ids = torch.arange(context)[None] % 2560
    engine.logits(ids[:, :-1], state, last_only=True)
    with engine.counters.span() as read:
        engine.logits(ids[:, -1:], state, last_only=True)
    assert ledger.decode_bytes_per_token.device_bytes == read.weight_bytes + engine.vector_bytes + state.read_bytes()
    assert ledger.flops_per_token == read.flops
    assert (ledger.decode_bytes_per_token.bus_bytes, ledger.decode_bytes_per_token.host_bytes) == (0, 0)


def test_a_prefill_reads_and_computes_what_the_engine_counts(both: tuple[LocalEngine, Ledger], request: pytest.FixtureRequest) -> None:
    engine, cell = both[0], nano(request.node.callspec.params["both"])
    sizes = qwen4_exp_sizes(json.loads((NANO / "config.json").read_text()), "nano", 2, torch.float32)
    with engine.counters.span() as read:
        engine.logits(torch.arange(PREFILL)[None] % 2560, engine.new_state(1, PREFILL), last_only=True)
    work, least = (forward(stored(cell, sizes), sizes, None, None, True, Pass(PREFILL, 1, 0, least=least)) for least in (False, True))
    assert work.flops == least.flops == read.flops
    assert least.device < read.weight_bytes + engine.vector_bytes, "a bound counts less than any text needs"
    # 512 tokens that choose 4 of 16 experts use all of them, in the estimate as in fact.
    assert work.device == pytest.approx(read.weight_bytes + engine.vector_bytes, rel=1e-9)


def test_the_state_has_the_bytes_that_the_engine_allocates(both: tuple[LocalEngine, Ledger]) -> None:
    engine, ledger = both
    assert ledger.state_bytes == engine.new_state(STATE_BATCH, STATE_TOKENS).nbytes()


def test_a_ledger_needs_no_weights(tmp_path: Path) -> None:
    project = Project(root=tmp_path, runs=tmp_path / "runs")
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    (cell,) = compose_cells(["model=flash_next", "path=paiton_native", "layers=48", "device=h200"], project)
    ledger = build(cell, geometry("flash_next"), "flash_next")
    assert ledger.weights() == {
        "experts": 120_795_955_200,
        "trunk": 3_578_265_600,
        "ple": 51_200_245_760,
        "head": 635_699_200,
        "embed": 635_699_200,
        "small": 95_477_760,
        "vectors": 2_556_800,
    }


def test_a_file_is_counted_as_it_is_held_and_a_tied_head_once(tmp_path: Path) -> None:
    path = model_of(hf_model("llama", True), "llama").write(tmp_path / "m.gguf")
    cell = compose_cells([f"artifact='{path}'", "path=gguf_plugin", "device=cpu"], PROJECT)[0]
    resident = {(e["component"], e["codec"]): (e["weights"], e["bytes"]) for e in LocalEngine(cell, ROOT).binder.resident()}
    ledger = build_of_file(cell, path)
    assert {(line.component, line.codec): (line.weights, line.bytes) for line in ledger.lines} == resident
    assert [line.bytes for line in ledger.lines if line.component == "head"] == [0]
