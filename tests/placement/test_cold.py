"""Experts computed on the CPU beside the slots equal those that are resident, to rounding; what is counted, what is refused, and what a lie looks like."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from lab.kernels import native

if native.unavailable():
    pytest.skip(str(native.unavailable()), allow_module_level=True)

from lab.artifacts import Checkpoint, HfWeights
from lab.cell import Cell, ComponentPlan, Placement
from lab.codecs import create
from lab.compose import compose_cells
from lab.counters import Counters
from lab.engines.path_binder import PathBinder
from lab.errors import GapError
from lab.kernels.experts import reference_experts
from lab.kernels.experts_bf16 import Bf16Experts
from lab.kernels.native.cold import TOTALS
from lab.kernels.planes import unpack_planes
from lab.kernels.verify import poisoned, random_ids, random_parts, relative_error
from lab.models.qwen4_exp.config import from_file
from lab.models.qwen4_exp.model import Qwen4Exp
from lab.ops import Packed
from lab.placement.checks import findings
from lab.placement.cold import ColdExperts, ColdPool
from lab.placement.cold_link import Launch
from lab.placement.pinned import PinnedMemory
from lab.placement.tiers import Tiers
from lab.project import Project
from lab.record import Status
from tests.kernels.support import DEVICE
from tests.models.tiny import text_ids, tiny_model, write_checkpoint
from tests.runner_helpers import ROOT

HERE = torch.device(DEVICE)
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
HIDDEN, WIDTH, EXPERTS, K, SLOTS = 64, 64, 9, 2, 4
TOLERANCE = 1e-3
"""float16 results of float32 sums: rounding 3e-4, and levels within 2.2e-4 on both sides alike."""


def stacks(kernel: Any) -> tuple[Tensor, Tensor]:
    if isinstance(kernel, Bf16Experts):
        return kernel.gate_up_weight.float(), kernel.down_weight.float()
    return unpack_planes(kernel.gate_up_planes), unpack_planes(kernel.down_planes)


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """Interpreted, the GPU's products take seconds each, and they have tests of their own: here they are plain torch on the planes that they would read."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setattr(ColdExperts, "_hot", lambda _, room, x, slots, weights: reference_experts(x, slots, weights, *stacks(room.kernel)))
            patch.setattr(
                "lab.placement.rooms.grouped_experts", lambda kernel, x, ids, weights, _: reference_experts(x, ids, weights, *stacks(kernel)).to(x.dtype)
            )
        yield


def packed(name: str, seed: int) -> tuple[Packed, Packed, Tensor, Tensor]:
    """Both stacks and their weights in float32."""
    torch.manual_seed(seed)
    codec = create(name)
    shapes = (EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    if name == "bf16":
        parts = [{"weight": (0.1 * torch.randn(shape, device=HERE)).bfloat16()} for shape in shapes]
    else:
        parts = [random_parts(codec, shape, DEVICE) for shape in shapes]
    counters = Counters()
    first, second = (Packed(codec, part, shape, 0, "experts", counters) for part, shape in zip(parts, shapes, strict=True))
    return first, second, codec.decode(parts[0], HIDDEN).clone(), codec.decode(parts[1], WIDTH).clone()


def made(
    slots: int = SLOTS, layers: tuple[int, ...] = (0,), name: str = "q2_g32", refuse: str | None = None, bell: bool = True
) -> tuple[ColdPool, list[tuple[Tensor, Tensor]]]:
    """A pool with its layers, and the layers' weights. `refuse`: the reason for which no memory can be pinned."""
    memory = PinnedMemory(HERE, None if refuse is None else lambda address, nbytes: refuse)
    pool = ColdPool(HERE, torch.float16, Counters(), Placement(slots=slots or None), layers, slots, K, memory, bell=bell)
    truth = []
    for layer in layers:
        first, second, gate_up, down = packed(name, layer)
        ColdExperts(first, second, layer, HERE, torch.float16, pool.counters, pool.placement, pool)
        assert not first.parts and not second.parts
        truth.append((gate_up, down))
    return pool, truth


def asked(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(tokens, HIDDEN, device=HERE).half(),
        random_ids(tokens, EXPERTS, K, DEVICE),
        torch.rand(tokens, K, device=HERE),
    )


def rows(pool: ColdPool) -> dict[str, int]:
    """Counted rows by device."""
    found: dict[str, int] = {}
    for (_, component, _, device), tally in pool.counters.tallies.items():
        assert component == "experts"
        found[device] = found.get(device, 0) + tally.rows
    return found


@pytest.mark.parametrize("name", ["w3_levels", "q2_levels", "q2_g32", "bf16"])
def test_it_equals_the_resident_experts_while_slots_change_hands(name: str) -> None:
    pool, ((gate_up, down),) = made(name=name)
    op, pairs = pool.cold[0], 0
    for step in range(8):
        torch.manual_seed(100 + step)
        x, ids, weights = asked(1 + step % 3)
        with poisoned():
            y = op(x, ids.long(), weights.half()) if step % 2 else op.step(x, ids, weights)
        assert y.dtype == torch.float16 and relative_error(y, reference_experts(x, ids, weights, gate_up, down)) < TOLERANCE
        pairs += ids.numel()
    told = pool.evidence()
    assert told["requests"] == [pairs] and told["hits"][0] + told["misses"][0] == pairs
    assert told["misses"] == told["computed_on_cpu"] and told["hits"][0] > 0 and told["promoted"][0] > SLOTS
    assert told["inconsistent"] == told["problems"] == [] and told["cpu"]["us_per_expert"] > 0 and told["cpu"]["read_bytes_s"] > 0
    assert sum(rows(pool).values()) == 2 * pairs
    moved = pool.moved()
    assert (moved.requests, moved.hits + moved.misses) == (pairs, pairs) and moved.bus_bytes >= told["promoted"][0] * told["expert_bytes"]


def test_without_slots_everything_is_computed_on_the_cpu() -> None:
    pool, ((gate_up, down),) = made(slots=0)
    x, ids, weights = asked(3)
    assert relative_error(pool.cold[0].step(x, ids, weights), reference_experts(x, ids, weights, gate_up, down)) < TOLERANCE
    told = pool.evidence()
    assert told["hits"] == [0] and told["computed_on_cpu"] == [3 * K] and rows(pool) == {"cpu": 6 * K}
    assert [held.device for held in pool.cold[0].held()] == ["cpu"]


def test_many_tokens_are_several_jobs_or_stream_whole_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 8
    monkeypatch.setattr("lab.placement.cold.MOST_TOKENS", most)
    pool, truth = made(layers=(0, 1))
    for stream_from in (None, 5):
        pool.stream_from = stream_from
        for layer, (gate_up, down) in enumerate(truth):
            x, ids, weights = asked(most + 3)
            before = pool.streamed_bytes
            y = pool.cold[layer](x, ids, weights)
            assert relative_error(y, reference_experts(x, ids, weights, gate_up, down)) < TOLERANCE
            assert (pool.streamed_bytes > before) == (stream_from == 5 and layer == 0)  # the second layer was asked for with the first
    told = pool.evidence()
    each = (most + 3) * K
    assert told["requests"] == told["streamed_rows"] == [each, each]
    assert pool.cold[0]._counted.stacks[0].counters is not pool.counters  # streamed rows are counted by the weights' own counters, which a binder shares


def test_what_warms_up_or_is_traced_counts_nowhere() -> None:
    pool, _ = made()
    pool.stream_from = 5
    pool.cold[0].step(*asked(2))
    before = pool.evidence(), rows(pool)
    with pool.counters.recording():
        pool.cold[0].step(*asked(3))
        with pool.counters.recording():  # a graph captured inside a trace
            pool.cold[0].step(*asked(1))
        pool.cold[0].step(*asked(3))
        pool.cold[0](*asked(7))
    after = pool.evidence(), rows(pool)
    names = ("requests", "hits", "misses", "computed_on_cpu", "streamed_rows", "streamed_bytes")
    assert [before[0][name] for name in names] == [after[0][name] for name in names] and before[1] == after[1]
    pool.cold[0].step(*asked(1))
    assert pool.evidence()["requests"] == [3 * K]


def test_refused_memory_is_named_and_the_results_stay() -> None:
    pool, ((gate_up, down),) = made(refuse="no more locked pages")
    for _ in range(3):
        x, ids, weights = asked(2)
        assert relative_error(pool.cold[0].step(x, ids, weights), reference_experts(x, ids, weights, gate_up, down)) < TOLERANCE
    told = pool.evidence()
    assert len(told["problems"]) == 2 and all("no more locked pages" in problem for problem in told["problems"])
    assert told["policy"].startswith("least recently used; at most 0 promotions") and told["promoted"] == [0]
    assert pool.cold[0].tables.expert_in.tolist() == list(range(SLOTS)) and told["hits"][0] > 0


def test_without_native_kernels_or_with_another_codec_there_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, _ = made()
    first, second, _, _ = packed("q2_g32", 0)
    first.codec = create("int8_g128")
    with pytest.raises(GapError, match="int8_g128, q2_g32 cannot be cpu_cold; the codecs that can: w3_levels"):
        ColdExperts(first, second, 0, HERE, torch.float16, pool.counters, pool.placement, pool)
    monkeypatch.setenv("LAB_NATIVE", "0")
    with pytest.raises(GapError, match="native kernels are switched off by LAB_NATIVE=0") as told:
        made()
    assert told.value.status is Status.UNSUPPORTED


def told_of_a_run() -> tuple[Cell, dict[str, Any]]:
    """A cell, and what a worker would tell of 5 tokens through its two layers: 4 in a prompt that streamed, one by the slots."""
    cell = compose_cells(["model=nano", "layers=2", "path=cpu_cold", "placement.slots=6", "device=h200"], Project(root=ROOT, runs=ROOT / "runs"))[0]
    tiers = {
        "kind": "cpu_cold", "slots": 6, "layers": [0, 1], "total_layers": 2, "count": 16, "per_token": 4,
        "requests": [4, 4], "hits": [3, 0], "misses": [1, 4], "streamed_rows": [16, 16], "problems": [], "inconsistent": [],
    }  # fmt: skip
    places = ((0, "cuda", 38), (0, "cpu", 2), (1, "cuda", 32), (1, "cpu", 8))
    ops = [{"layer": layer, "component": "experts", "device": device, "rows": count} for layer, device, count in places]
    return cell, {"tiers": tiers, "ops": ops, "tokens_forwarded": 5}


def test_rows_are_where_the_requests_say() -> None:
    cell, evidence = told_of_a_run()
    assert findings(cell, evidence) == []
    for number, place, needed in ((0, "cuda", "19 requests need 38"), (3, "cpu", "4 requests need 8")):
        ops = copy.deepcopy(evidence["ops"])
        ops[number]["rows"] -= 2
        ((status, why),) = findings(cell, {**evidence, "ops": ops})
        assert status is Status.PATH_NOT_EXECUTED and f"rows were computed on {place}, where {needed}" in why
    everything_on_the_gpu = [{**op, "device": "cuda", "rows": 40} for op in evidence["ops"][::2]]
    assert len(findings(cell, {**evidence, "ops": everything_on_the_gpu})) == 4


@torch.no_grad()
def test_a_model_with_cold_experts_says_what_the_plain_model_says(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", tiny_model(3), "fused")
    config, counters = from_file(tmp_path / "m" / "config.json"), Counters()
    tiers = Tiers("cpu_cold", Placement(slots=4, resident_layers=1), config, HERE, torch.float16, counters)
    models = []
    cold, resident = ComponentPlan(codec="q2_g32", placement="cpu_cold"), ComponentPlan(codec="q2_g32")
    for one, own, counted in ((cold, tiers, counters), (resident, None, Counters())):
        plan = {"experts": one}
        models.append(Qwen4Exp(config, PathBinder(HfWeights(Checkpoint(tmp_path / "m")), plan, HERE, torch.float16, counted, tiers=own)))
    ids = text_ids(1, 9).to(DEVICE)
    states = [model.new_state(1, 9, HERE, torch.float16) for model in models]
    for start, end in ((0, 6), (6, 7), (7, 8), (8, 9)):
        first, second = (model.logits(ids[:, start:end], state) for model, state in zip(models, states, strict=True))
        assert relative_error(first, second) < 5e-3, f"tokens {start} to {end}"
    told = tiers.evidence()
    assert tiers.layers == (1, 2) and told["requests"] == [9 * config.experts_per_token] * 2 and told["inconsistent"] == []
    assert min(told["hits"]) > 0 and min(told["computed_on_cpu"]) > 0
    assert [held.weights for held in tiers.held() if held.codec == "q2_g32" and held.component == "experts"]


def test_a_bell_calls_jobs_in_turn_and_an_answer_that_does_not_come_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, truth = made(layers=(0, 1))
    assert pool.link is not None and pool.link.hang_bell() is None
    for step in range(4):
        for layer, (gate_up, down) in enumerate(truth):
            x, ids, weights = asked(1 + step % 2)
            assert relative_error(pool.cold[layer].step(x, ids, weights), reference_experts(x, ids, weights, gate_up, down)) < 3e-3
    told = pool.evidence()
    assert told["joined_by"] == "bell" and told["inconsistent"] == [] and [total[0] for total in pool.totals.tolist()] == [4, 4]
    pool.office._leave()  # nobody attends any more
    monkeypatch.setattr("lab.placement.cold_link.MOST_LOOKS", 3)
    pool.cold[0].step(*asked(1))
    assert "did not answer in time 1 times" in pool.evidence()["inconsistent"][0]


@needs_gpu
@pytest.mark.parametrize("bell", [True, False])
def test_on_a_gpu_a_captured_step_is_the_eager_one_and_counts_the_same(bell: bool) -> None:
    pool, ((gate_up, down),) = made(bell=bell)
    op = pool.cold[0]
    assert pool.graph_reason is None and pool.evidence()["joined_by"] == ("bell" if bell else "host node")
    x, ids, weights = asked(2)
    with pool.counters.recording():
        op.step(x, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with pool.counters.recording(), torch.cuda.graph(graph):
        y = op.step(x, ids, weights)
    for step in range(6):
        torch.manual_seed(step)
        for own, its in zip((x, ids, weights), asked(2), strict=True):
            own.copy_(its)
        graph.replay()
        torch.cuda.synchronize()
        assert relative_error(y, reference_experts(x, ids, weights, gate_up, down)) < 3e-3
    told = pool.evidence()
    assert told["requests"] == [24] and told["inconsistent"] == [] and told["hits"][0] > 0


@needs_gpu
def test_a_driver_that_refuses_host_functions_is_named_and_the_results_stay() -> None:
    refuse: Launch = lambda stream, function, argument: 801  # noqa: E731
    pool = ColdPool(HERE, torch.float16, Counters(), Placement(slots=SLOTS), (0,), SLOTS, K, launch=refuse, bell=False)
    first, second, gate_up, down = packed("q2_g32", 0)
    op = ColdExperts(first, second, 0, HERE, torch.float16, pool.counters, pool.placement, pool)
    x, ids, weights = asked(2)
    assert relative_error(op.step(x, ids, weights), reference_experts(x, ids, weights, gate_up, down)) < 3e-3
    assert pool.graph_reason is not None and "error 801" in pool.graph_reason and "error 801" in pool.evidence()["problems"][0]


def test_counts_that_disagree_are_told() -> None:
    pool, _ = made()
    op = pool.cold[0]
    op.step(*asked(2))
    good = op.tables.counts.clone()
    pool.totals[0, TOTALS.index("pairs")] += 1
    assert "the CPU computed" in pool.evidence()["inconsistent"][0]
    pool.totals[0, TOTALS.index("pairs")] -= 1
    op.tables.counts[3] = good[2] + 1
    assert "were brought for" in pool.evidence()["inconsistent"][0]
    op.tables.counts.copy_(good)
    op.step(torch.randn(1, HIDDEN, device=HERE).half(), torch.tensor([[0, EXPERTS]], device=HERE), torch.rand(1, K, device=HERE))
    assert "experts that do not exist" in pool.evidence()["inconsistent"][0]
