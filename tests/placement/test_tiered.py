"""Experts behind slots equal those that are resident, to the bit: one layer on random streams, a small model whole, and what evidence says of a run."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from lab.artifacts import Checkpoint, HfWeights
from lab.capacity.build import build
from lab.cell import Cell, ComponentPlan, Placement
from lab.codecs import create
from lab.compose import compose_cells
from lab.counters import Counters
from lab.engines.local import LocalEngine
from lab.engines.local_attempt import LocalAttempt
from lab.engines.path_binder import PathBinder
from lab.errors import GapError
from lab.evidence import check
from lab.kernels.experts import LowBitExperts, reference_experts
from lab.kernels.experts_bf16 import Bf16Experts
from lab.kernels.planes import unpack_planes
from lab.kernels.verify import poisoned, random_ids, random_parts
from lab.models.qwen4_exp.config import from_file
from lab.models.qwen4_exp.model import Qwen4Exp
from lab.ops import Packed
from lab.ops_gpu import KernelExperts
from lab.placement.checks import promised_share
from lab.placement.pinned import PinnedMemory, never
from lab.placement.tiered import TieredExperts, TieredPool
from lab.placement.tiers import Tiers
from lab.project import Project
from lab.record import Status
from tests.kernels.support import DEVICE
from tests.models.tiny import text_ids, tiny_model, write_checkpoint
from tests.runner_helpers import ROOT

HERE = torch.device(DEVICE)
HIDDEN, WIDTH, EXPERTS, K = 64, 64, 9, 2
PROJECT = Project(root=ROOT, runs=ROOT / "runs")


def multiplied(kernel: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, between: Any = None) -> torch.Tensor:
    if isinstance(kernel, Bf16Experts):
        return reference_experts(x, ids, weights, kernel.gate_up_weight.float(), kernel.down_weight.float()).to(x.dtype)
    return reference_experts(x, ids, weights, unpack_planes(kernel.gate_up_planes), unpack_planes(kernel.down_planes)).to(x.dtype)


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """Interpreted, the products take seconds each, and they have tests of their own: here they are plain torch on the planes that they would read."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            for kind in (LowBitExperts, Bf16Experts):
                patch.setattr(kind, "__call__", multiplied)
            for module in ("lab.kernels.experts_prefill", "lab.placement.rooms"):
                patch.setattr(f"{module}.grouped_experts", multiplied)
        yield


def stacks(codec: str, layer: int, counters: Counters) -> tuple[Packed, Packed]:
    torch.manual_seed(layer)
    made = create(codec)
    shapes = (EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    if codec == "bf16":
        parts = [{"weight": (torch.randn(shape, device=DEVICE) / 8).to(torch.bfloat16)} for shape in shapes]
    else:
        parts = [random_parts(made, shape, DEVICE) for shape in shapes]
    first, second = (Packed(made, one, shape, layer, "experts", counters) for one, shape in zip(parts, shapes, strict=True))
    return first, second


@pytest.mark.parametrize(("codec", "slots"), [("w3_levels", 3), ("bf16", 0)])
def test_a_layer_behind_slots_is_the_resident_layer(codec: str, slots: int) -> None:
    counters, plain = Counters(), Counters()
    pool = TieredPool(HERE, counters, (0, 1), slots, K, PinnedMemory(HERE))
    tiered = [TieredExperts(*stacks(codec, layer, counters), layer, pool) for layer in (0, 1)]
    resident = [KernelExperts(*stacks(codec, layer, plain)) for layer in (0, 1)]
    dtype = torch.bfloat16 if codec == "bf16" else torch.float16
    last = random_ids(1, EXPERTS, K, DEVICE)
    for tokens in (1, 17, 1, 2):  # two tokens may need more than three slots, and then stream as the seventeen do
        x, ids, weights = torch.randn(tokens, HIDDEN, device=DEVICE).to(dtype), random_ids(tokens, EXPERTS, K, DEVICE), torch.rand(tokens, K, device=DEVICE)
        if tokens == 1:
            ids[0, 1] = last[0, 0]
            ids[0, 0] = (last[0, 0] + 1) % EXPERTS
            last = ids
        for op, other in zip(tiered, resident, strict=True):
            with poisoned():
                got = op(x, ids, weights)
            assert torch.equal(got, other(x, ids, weights)), f"{tokens} tokens"
    assert [(t["layer"], t["op"], t["rows"], t["weight_bytes"], t["flops"]) for t in counters.as_list()] == [
        (t["layer"], t["op"], t["rows"], t["weight_bytes"], t["flops"]) for t in plain.as_list()
    ]
    told = pool.evidence()
    streams = 2 if slots else 1
    streamed = (17 + 2 * (streams - 1)) * K
    assert told["streamed_rows"] == [streamed, streamed] and told["inconsistent"] == []
    assert told["requests"] == [21 * K - streamed] * 2 == [hits + misses for hits, misses in zip(told["hits"], told["misses"], strict=True)]
    assert told["hits"][0] >= (1 if slots else 0) and (slots or told["misses"][0] > 2 * K)
    moved = pool.moved()
    assert moved.bus_bytes == sum(told["copied"]) * told["expert_bytes"] and moved.streamed_bytes == streams * 2 * tiered[0].host_bytes


class KernelBinder(PathBinder):
    """Experts through kernels, on a CPU too, where Triton interprets them."""

    def _fast(self, swap: Any, op: Any) -> Any:
        return swap(op, self.dtype)[0] if hasattr(op, "gate_up") else op


@torch.no_grad()
def test_a_model_behind_slots_says_what_the_resident_model_says(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", tiny_model(3), "fused")
    config = from_file(tmp_path / "m" / "config.json")
    counters = Counters()
    tiers = Tiers("tiered", Placement(slots=4, resident_layers=1), config, HERE, torch.float16, counters)
    models = []
    given: list[tuple[Any, Tiers | None, Counters]] = [("tiered", tiers, counters), ("device", None, Counters())]
    for kind, own, counted in given:
        plan = {"experts": ComponentPlan(codec="q2_g32", placement=kind)}
        models.append(Qwen4Exp(config, KernelBinder(HfWeights(Checkpoint(tmp_path / "m")), plan, HERE, torch.float16, counted, tiers=own)))
    ids = text_ids(1, 13).to(DEVICE)
    states = [model.new_state(1, 13, HERE, torch.float16) for model in models]
    for start, end in ((0, 10), (10, 11), (11, 12), (12, 13)):
        first, second = (model.logits(ids[:, start:end], state) for model, state in zip(models, states, strict=True))
        assert torch.equal(first, second), f"tokens {start} to {end}"
    assert tiers.layers == (1, 2) and isinstance(models[0].layers[0].moe.experts, KernelExperts)
    assert tiers.moved().requests == 2 * 3 * config.experts_per_token


@pytest.fixture(scope="module")
def ran() -> tuple[Cell, dict[str, Any]]:
    """The evidence of a run that the interpreter can take, on a CPU as its own second memory."""
    words = [
        "model=nano",
        "layers=2",
        "path=tiered",
        "placement.slots=6",
        "device=cpu",
        "device.compute_dtype=bfloat16",
        "path.components.experts.codec=q2_g32",
    ]
    cell = compose_cells(words, PROJECT)[0]
    engine, attempt = LocalEngine(cell, ROOT), LocalAttempt(cell, ROOT, ROOT, io.StringIO())
    state = engine.new_state(1, 16)
    ids = torch.arange(16)[None] * 7
    for start, end in ((0, 12), (12, 13)):
        engine.logits(ids[:, start:end], state)
        with engine.counters.recording():  # as the trace that shares are told from: work of no token
            engine.logits(ids[:, :12], engine.new_state(1, 16))
    attempt._collect_evidence(engine)
    return cell, attempt.result.evidence


def test_the_ledger_predicts_what_lies_where(ran: tuple[Cell, dict[str, Any]]) -> None:
    cell, evidence = ran
    ledger = build(cell, json.loads((ROOT / "experiments" / "nano" / "config.json").read_text()), "nano")
    planned, held = ({"experts": 0, "staging": 0} for _ in range(2))
    for line in ledger.lines:
        if line.component in planned:
            planned[line.component] += line.bytes
    for entry in evidence["resident"]:
        if entry["component"] in held:
            held[entry["component"]] += entry["bytes"]
    assert held["experts"] == pytest.approx(planned["experts"], rel=2e-3) and held["staging"] == pytest.approx(planned["staging"], rel=2e-3)
    assert [(one.kept, one.total) for one in ledger.residency] == [(2 * 6, 2 * 16)]
    assert promised_share(cell, "experts", evidence) == 6 / 16 and promised_share(cell, "trunk", evidence) == 1.0


def changed(evidence: dict[str, Any], **tiers: Any) -> dict[str, Any]:
    return {**evidence, "tiers": {**evidence["tiers"], **tiers}}


def test_evidence_of_a_run_holds(ran: tuple[Cell, dict[str, Any]]) -> None:
    cell, evidence = ran
    assert check(cell, evidence) == []
    assert evidence["tiers"]["requests"] == [4, 4] and evidence["tiers"]["streamed_rows"] == [48, 48]
    (experts,) = [e for e in evidence["resident"] if e["component"] == "experts"]
    assert experts["weights"] == evidence["weights"]["experts"] * (16 + 6) // 16, "on a CPU both places are one"


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        ({"kind": "device"}, Status.PATH_NOT_EXECUTED, "tiered placement was asked for, and the worker reported device"),
        ({"slots": 12}, Status.PATH_NOT_EXECUTED, "12 slots a layer, placement.slots=6 was asked for"),
        ({"layers": [1]}, Status.PATH_NOT_EXECUTED, "1 layers were kept in part, the placement asks for 2"),
        ({"hits": [99, 0]}, Status.PATH_NOT_EXECUTED, "99 hits and"),
        ({"streamed_rows": [48, 44]}, Status.PATH_NOT_EXECUTED, "layer 1: 4 requests to the slots and 44 streamed, where the tokens forwarded need 52"),
        ({"inconsistent": ["layer 0: an expert is in two slots"]}, Status.PATH_NOT_EXECUTED, "an expert is in two slots"),
        ({"problems": ["the CPU's threads did not start"]}, Status.DEGRADED, "the CPU's threads did not start"),
    ],
)
def test_a_tier_that_did_something_else_is_seen(ran: tuple[Cell, dict[str, Any]], change: dict[str, Any], status: Status, reason: str) -> None:
    cell, evidence = ran
    found = check(cell, changed(evidence, **change))
    assert found and found[0][0] is status and any(reason in why for _, why in found), found


def test_a_tier_that_was_switched_off_is_seen(ran: tuple[Cell, dict[str, Any]]) -> None:
    cell, evidence = ran
    gone = {key: value for key, value in evidence.items() if key != "tiers"}
    assert check(cell, gone)[0] == (Status.PATH_NOT_EXECUTED, "experts: tiered placement was asked for, and the worker reported none")
    less = [{**e, "weights": e["weights"] // 8} if e["component"] == "experts" else e for e in evidence["resident"]]
    found = check(cell, {**evidence, "resident": less})
    assert [status for status, _ in found] == [Status.DEGRADED] and "of its weights are resident" in found[0][1]


def test_refused_host_memory_is_named_and_what_can_goes_on_degraded(ran: tuple[Cell, dict[str, Any]]) -> None:
    memory = PinnedMemory(HERE, never)
    with pytest.raises(GapError, match="layer 3's experts: 0.0 MB of pinned host memory were refused .disable=pinned.") as refused:
        TieredExperts(*stacks("q2_g32", 3, Counters()), 3, TieredPool(HERE, Counters(), (3,), 4, K, memory))
    assert refused.value.status is Status.UNSUPPORTED
    assert memory.or_plain((3, 5), torch.float32, "the table").shape == (3, 5) and len(memory.refused) == 2
    cell, evidence = ran
    found = check(cell, {**evidence, "pinned": memory.evidence()})
    assert {status for status, _ in found} == {Status.DEGRADED} and any("the table: 0.0 MB of pinned host memory were refused" in why for _, why in found)


def test_slots_too_few_for_a_step_are_refused_with_the_least_that_works(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", tiny_model(2), "fused")
    config = from_file(tmp_path / "m" / "config.json")
    with pytest.raises(
        GapError, match=r"placement.slots=2: a step of 1 sequence may use 3 different experts of a layer; the least that works is placement.slots=3"
    ):
        Tiers("tiered", Placement(slots=2), config, HERE, torch.float16, Counters())
    tiers = Tiers("tiered", Placement(slots=5), config, HERE, torch.float16, Counters())
    with pytest.raises(GapError, match=r"a step of 4 sequences may use 8 different experts.*placement.slots=8"):
        tiers.refuse(4)
    assert Tiers("tiered", Placement(slots=8), config, HERE, torch.float16, Counters()).layers == (), "all of them stay"
    assert Tiers("tiered", Placement(resident_layers=1), config, HERE, torch.float16, Counters()).layers == (1,)


def test_experts_in_a_codec_without_a_kernel_are_refused() -> None:
    codec = create("int8_g128")
    shapes = (EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    first, second = (Packed(codec, codec.encode(torch.randn(shape, device=DEVICE)), shape, 0, "experts", Counters()) for shape in shapes)
    with pytest.raises(GapError, match="experts in int8_g128 cannot be tiered; the codecs that can: w3_levels, q2_levels, q2_g32, bf16"):
        TieredExperts(first, second, 0, TieredPool(HERE, Counters(), (0,), 4, K, PinnedMemory(HERE)))
