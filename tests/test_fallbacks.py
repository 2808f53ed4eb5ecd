"""A fallback is seen and named: kernels that did not run, a step that was not captured; and what is made to fail on purpose cannot be taken for the path."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab import ops_gpu
from lab.cell import Cell, EvidenceRule
from lab.codecs import create
from lab.compose import compose_cells
from lab.counters import Counters
from lab.engines import graphs
from lab.engines.path_binder import PathBinder
from lab.errors import LabError
from lab.evidence import check
from lab.fill import fill_words
from lab.ops import Packed, PackedLinear
from lab.project import Project
from lab.record import Status
from lab.run_fields import params
from tests.matrix_helpers import cell, record
from tests.models.tiny import tiny_model, write_checkpoint
from tests.runner_helpers import make_project

ROOT = Path(__file__).parents[1]


def on_gpu(**changes: Any) -> Cell:
    """A cell of source precision with one rule, on a GPU."""
    plain = cell()
    path = plain.path.model_copy(update={"evidence": (EvidenceRule(component="experts", op="bf16"),)})
    device = plain.device.model_copy(update={"torch_device": "cuda", "compute_dtype": "bfloat16"})
    return plain.model_copy(update={"path": path, "device": device, "layers": 1, **changes})


def evidence(**changes: Any) -> dict[str, Any]:
    """What a worker reports where everything was as it should be."""
    plain = {
        "ops": [{"layer": 0, "component": "experts", "op": "bf16", "device": "cuda", "calls": 1, "rows": 8, "weight_bytes": 1, "flops": 1}],
        "resident": [{"component": "experts", "codec": "bf16", "device": "cuda", "bytes": 2, "tensors": 1, "weights": 10}],
        "component_layers": {"experts": [0]},
        "layers": 1,
        "source_codecs": {},
        "weights": {"experts": 10},
        "rows_per_token": [[0, "experts", 2]],
        "tokens_forwarded": 4,
        "graph": {"mode": "graph", "reason": None},
        "fallbacks": [],
    }
    return {**plain, **changes}


EAGER = {"mode": "eager", "reason": "not captured: operation not permitted when stream is capturing (disable=graph)"}


def test_decoding_that_was_asked_to_be_captured_and_was_not_is_another_path() -> None:
    assert check(on_gpu(), evidence()) == check(on_gpu(mode="graph"), evidence()) == []
    assert check(on_gpu(), evidence(graph=EAGER)) == [], "mode=auto leaves it to the engine, whose note says why"
    ((status, reason),) = check(on_gpu(mode="graph"), evidence(graph=EAGER))
    assert status is Status.PATH_NOT_EXECUTED
    assert reason.startswith("mode=graph was asked for; decoding ran operation by operation: not captured: operation not permitted")
    assert check(on_gpu(mode="eager"), evidence())[0] == (Status.PATH_NOT_EXECUTED, "mode=eager was asked for; decoding ran as a captured graph")
    assert "reported no launches" in check(on_gpu(mode="graph"), evidence(graph={}))[0][1]


def test_a_kernel_that_did_not_run_is_degraded_and_a_shape_it_does_not_take_is_not() -> None:
    one = {"component": "experts", "codec": "q2_g32", "operations": 3}
    limit = evidence(fallbacks=[{**one, "reason": "640 columns are no multiple of 128", "fault": False}])
    assert check(on_gpu(), limit) == []
    fault = evidence(fallbacks=[{**one, "reason": "triton is not installed", "fault": True}])
    assert check(on_gpu(), fault) == [(Status.DEGRADED, "experts: q2_g32 ran as torch in 3 operations, where it has a GPU kernel: triton is not installed")]


def test_what_was_to_be_made_to_fail_must_have_been() -> None:
    assert "the worker did not say that it was done" in check(on_gpu(disable="kernels"), evidence())[0][1]
    assert check(on_gpu(disable="graph"), evidence(disabled="graph", graph=EAGER)) == []


def packed(codec: str, counters: Counters) -> PackedLinear:
    torch.manual_seed(0)
    made = create(codec)
    return PackedLinear(Packed(made, made.encode(torch.randn(64, 256)), (64, 256), 0, "trunk", counters))


@pytest.fixture
def binder(tmp_path: Path) -> Any:
    """Of a machine that says it has a GPU; the interpreter stands in for it."""

    def make(disable: str | None) -> PathBinder:
        made = PathBinder(SimpleNamespace(), {}, torch.device("cpu"), torch.bfloat16, Counters(), disable=disable)
        made.device = torch.device("cuda")
        return made

    return make


def test_the_binder_names_what_has_a_kernel_and_stayed_with_torch(binder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    plain, disabled = binder(None), binder("kernels")
    assert isinstance(plain._fast(ops_gpu.linear, packed("int8_g128", plain.counters)), ops_gpu.KernelLinear) and not plain.fallbacks_as_list()
    assert isinstance(disabled._fast(ops_gpu.linear, packed("int8_g128", disabled.counters)), PackedLinear)
    named = {"component": "trunk", "codec": "int8_g128", "operations": 1}
    assert disabled.fallbacks_as_list() == [{**named, "reason": "disable=kernels", "fault": True}]
    disabled._fast(ops_gpu.linear, packed("bf16", disabled.counters))
    assert len(disabled.fallbacks_as_list()) == 1, "a codec without a kernel lost none"
    monkeypatch.setattr(ops_gpu, "find_spec", lambda name: None)
    plain._fast(ops_gpu.linear, packed("int8_g128", plain.counters))
    assert plain.fallbacks_as_list() == [{**named, "reason": "triton is not installed", "fault": True}]


def test_a_dtype_or_a_shape_that_a_kernel_does_not_take_is_told_and_is_no_fault(binder: Any) -> None:
    pytest.importorskip("triton")
    full = binder(None)
    full.dtype = torch.float32
    full._fast(ops_gpu.linear, packed("int8_g128", full.counters))
    (told,) = full.fallbacks_as_list()
    assert told["fault"] is False and told["reason"] == "kernels take 16-bit activations, not float32"


def test_a_capture_that_fails_leaves_a_state_without_a_graph_and_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lab.artifacts import Checkpoint, HfWeights
    from lab.models.qwen4_exp.config import from_file
    from lab.models.qwen4_exp.model import Qwen4Exp

    class Failing:
        launches = 7

        def __init__(self, step: Any, state: Any, batch: int, counters: Any, pool: Any, count: bool, spoil: bool) -> None:
            if spoil:
                raise RuntimeError("operation not permitted\nwhen stream is capturing")

    write_checkpoint(tmp_path, tiny_model(2), "fused")
    device = torch.device("cpu")
    model = Qwen4Exp(from_file(tmp_path / "config.json"), PathBinder(HfWeights(Checkpoint(tmp_path)), {}, device, torch.float32, Counters()))
    monkeypatch.setattr(graphs.Graphs, "_against", lambda self: None)
    monkeypatch.setattr(graphs.Graphs, "_prepare", lambda self: None)
    monkeypatch.setattr(graphs, "StepGraph", Failing)
    for spoil, mode in ((False, "graph"), (True, "eager")):
        made = graphs.Graphs(model, device, torch.float32, Counters(), "auto", "graph" if spoil else None)
        state: Any = made.new_state(1, 8)
        assert (state.graph is None) is spoil and made.evidence()["mode"] == mode
    assert made.evidence()["reason"] == "not captured: operation not permitted when stream is capturing (disable=graph)"


def test_disable_is_part_of_the_cell_its_id_and_its_command(tmp_path: Path) -> None:
    project: Project = make_project(tmp_path / "p")
    plain, without = (compose_cells(["path=expert_q2", "layers=3", "device=cpu", *words], project)[0] for words in ([], ["disable=graph"]))
    assert plain.disable is None and "disable" not in plain.identity() and without.hash != plain.hash
    assert "-without_graph-" in without.id and "disable=graph" in fill_words(project, without)
    assert params(record(without))["disable"] == "graph" and "disable" not in params(record(plain))
    with pytest.raises(LabError, match=r"^disable=speed: "):
        compose_cells(["device=cpu", "disable=speed"], project)
    with pytest.raises(LabError, match="disable=graph: only engine=local can have something made to fail, and this is engine=server"):
        compose_cells(["path=strata_server", "model=flash_next", "layers=48", "device=cpu", "disable=graph"], project)
