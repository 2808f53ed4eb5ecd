"""What stays on the device in part: experts by slots and layers, and the strip cache of a VQF cell with its budgets."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.capacity import Ledger
from lab.capacity.sizes import Weight
from lab.capacity.tiers import _kept, strip_bytes
from lab.engines.strip_limits import MB
from lab.project import Project
from tests.capacity.helpers import in_process, ledger_of
from tests.runner_helpers import make_project

__all__ = ["in_process"]
pytestmark = pytest.mark.usefixtures("in_process")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path / "p")


def tiered(project: Project, *words: str) -> Ledger:
    return ledger_of(project, "model=flash_next", "path=tiered", "layers=6", "device=r9700", *words)


def expert_bytes(ledger: Ledger, where: str) -> int:
    return sum(line.bytes for line in ledger.lines if line.component == "experts" and line.where == where)


def test_slots_lie_on_the_device_and_all_experts_on_the_host(project: Project) -> None:
    ledger = tiered(project, "placement.slots=8")
    assert ledger.experts is not None
    assert expert_bytes(ledger, "device") == 6 * 8 * ledger.experts.bytes_each
    assert expert_bytes(ledger, "host") == 6 * 512 * ledger.experts.bytes_each
    assert next(line for line in ledger.lines if line.component == "staging").bytes == 512 * ledger.experts.bytes_each
    assert [(r.kept, r.total) for r in ledger.residency] == [(48, 3072)]
    assert ledger.weights()["experts"] == 6 * 512 * 3 * 640 * 2560


def test_prompts_of_cold_experts_pass_through_the_same_staging_area(project: Project) -> None:
    ledger = ledger_of(project, "model=flash_next", "path=cpu_cold", "layers=6", "device=r9700", "placement.slots=8")
    assert ledger.experts is not None
    staging = next(line for line in ledger.lines if line.component == "staging")
    assert (staging.bytes, staging.placement) == (512 * ledger.experts.bytes_each, "cpu_cold")
    assert ledger.device_bytes == tiered(project, "placement.slots=8").device_bytes


def test_a_bench_with_deeper_contexts_needs_room_for_them(project: Project) -> None:
    usual, deep = (ledger_of(project, "model=flash_next", "path=expert_q2", "layers=4", "device=r9700", *words) for words in ((), ("bench=h200",)))
    assert (usual.state_basis, deep.state_basis) == ("4 sequences of 4096 tokens", "4 sequences of 4224 tokens")
    assert deep.state_bytes > usual.state_bytes


def test_resident_layers_need_no_host_copy(project: Project) -> None:
    ledger = tiered(project, "placement.resident_layers=2")
    assert ledger.experts is not None
    layer = 512 * ledger.experts.bytes_each
    assert (expert_bytes(ledger, "device"), expert_bytes(ledger, "host")) == (2 * layer, 4 * layer)
    assert next(line for line in ledger.lines if line.component == "staging").bytes == layer
    assert ledger.decode_bytes_per_token.bus_bytes == 4 * 10 * ledger.experts.bytes_each + 16 * 160 + 2  # and the table's rows with its scale


def test_everything_resident_is_the_plain_path_with_its_table_on_the_host(project: Project) -> None:
    plain = ledger_of(project, "model=flash_next", "path=paiton_native", "layers=6", "device=r9700", "path.components.ple.placement=host")
    for words in ("placement.resident_layers=6", "placement.resident_layers=40", "placement.slots=512"):
        ledger = tiered(project, words)
        assert (ledger.device_bytes, ledger.host_bytes, ledger.tg_bound_tok_s) == (plain.device_bytes, plain.host_bytes, plain.tg_bound_tok_s)


def test_cold_experts_are_read_by_the_cpu_which_has_no_figure(project: Project) -> None:
    ledger = ledger_of(project, "model=flash_next", "path=cpu_cold", "layers=6", "device=r9700", "placement.slots=256")
    assert ledger.experts is not None
    assert ledger.decode_bytes_per_token.host_bytes == 6 * 10 * ledger.experts.bytes_each / 2
    assert ledger.estimates_tok_s == (None, None, None)
    assert any("no estimates" in note for note in ledger.notes)
    cold = ledger_of(project, "model=flash_next", "path=cpu_cold", "layers=6", "device=r9700", "placement.slots=9")
    assert cold.bounds_tok_s == (None, None, None), "of 10 experts 9 have a slot"
    warm = ledger_of(project, "model=flash_next", "path=cpu_cold", "layers=6", "device=r9700", "placement.slots=512")
    assert warm.tg_bound_tok_s is not None and warm.notes == ()
    assert ledger.tg_bound_tok_s == warm.tg_bound_tok_s, "if every request hits"


@pytest.mark.parametrize("slots", [1, 9, 10, 300, 511])
def test_a_bound_takes_every_slot_as_hit_and_an_estimate_only_its_share(project: Project, slots: int) -> None:
    ledger = tiered(project, f"placement.slots={slots}")
    whole = tiered(project, "placement.slots=512")
    assert ledger.experts is not None
    bus_s = (6 * max(0, 10 - slots) * ledger.experts.bytes_each + 16 * 160 + 2) / 53e9  # the misses that no cache avoids, the table's rows and their scale
    assert whole.tg_bound_tok_s is not None
    assert ledger.tg_bound_tok_s == pytest.approx(min(whole.tg_bound_tok_s, 1 / bus_s))
    for bound, estimate in zip(ledger.bounds_tok_s, ledger.estimates_tok_s, strict=True):
        assert bound is not None and estimate is not None and estimate <= bound
    assert "every slot holds one of them" in ledger.basis


def test_tokens_may_share_experts_so_a_bound_on_many_counts_those_of_one(project: Project) -> None:
    ledger = ledger_of(project, "model=flash_next", "path=paiton_native", "layers=6", "device=r9700")
    (tg, agg4, pp), (same, fewer, slower) = ledger.bounds_tok_s, ledger.estimates_tok_s
    assert None not in (tg, agg4, pp, same, fewer, slower)
    assert same == tg and fewer < agg4 < 4 * tg and slower < pp  # type: ignore[operator]
    dense = kestrel(project)
    assert dense.bounds_tok_s == pytest.approx(dense.estimates_tok_s, rel=1e-5) and "experts" not in dense.basis


def test_more_whole_layers_than_there_are_is_said_to_be_all(project: Project) -> None:
    assert tiered(project, "placement.resident_layers=40").notes == ("placement.resident_layers=40: all 6 layers, which is the same cell as with 6",)


def kestrel(project: Project, *words: str, model: str = "qwen3_8b") -> Ledger:
    return ledger_of(project, f"model={model}", "path=kestrel_vqf", "device=rtx5090", *words)


@pytest.mark.parametrize(
    ("model", "codes", "with_scales", "entries"), [("qwen3_2b", 1.409e9, 1.585e9, 196), ("qwen3_8b", 6.946e9, 7.814e9, 252), ("qwen3_30b_a3b", None, None, 336)]
)
def test_the_strip_cache_has_the_sizes_and_slots_of_the_notes(
    project: Project, model: str, codes: float | None, with_scales: float | None, entries: int
) -> None:
    ledger = kestrel(project, "placement.slots=1000", model=model)
    assert {(r.kept, r.total) for r in ledger.residency} == {(entries, entries)}
    if codes is not None:
        assert ledger.residency[0].needed_bytes == pytest.approx(with_scales, rel=1e-3)
        assert ledger.weights()["trunk"] == pytest.approx(codes, rel=1e-3)


def test_a_budget_of_the_codes_alone_does_not_hold_the_scales(project: Project) -> None:
    short = kestrel(project, "placement.host_budget_mb=7000", "placement.slots=256", "placement.device_budget_mb=8192")
    assert [(r.where, r.kept) for r in short.residency] == [("host", 234), ("device", 252)]
    assert short.decode_bytes_per_token.bus_bytes == 0
    slots = kestrel(project, "placement.device_budget_mb=8192", "placement.slots=196")
    missing = slots.residency[1].needed_bytes - sum(line.bytes for line in slots.lines if line.component == "strips" and line.where == "device")
    assert slots.decode_bytes_per_token.bus_bytes == missing > 0
    assert slots.tg_bound_tok_s is not None and short.tg_bound_tok_s is not None and slots.tg_bound_tok_s < short.tg_bound_tok_s


def test_without_budgets_the_file_lies_where_the_path_says(project: Project) -> None:
    assert kestrel(project).residency == ()
    on_cpu = ledger_of(project, "model=qwen3_8b", "path=kestrel_vqf", "device=cpu", "placement.host_budget_mb=100")
    assert [(r.where, r.kept) for r in on_cpu.residency] == [("host", 1)] and on_cpu.host_limit_bytes is None, "that budget is the strip cache's alone"
    assert ledger_of(project, "model=qwen3_8b", "path=kestrel_vqf", "device=cpu", "placement.device_budget_mb=100").residency == (), "a CPU has no device"


@given(
    st.lists(st.integers(1, 40).map(lambda n: Weight("q", "trunk", "matrix", (n * 1024, 32 * 32), 0)), min_size=1, max_size=30),
    st.integers(1, 60),
    st.one_of(st.none(), st.integers(1, 40)),
)
def test_what_stays_is_the_longest_tail_within_both_limits(entries: list[Weight], budget_mb: int, slots: int | None) -> None:
    kept = _kept(entries, budget_mb, slots)
    assert sum(map(strip_bytes, kept)) <= budget_mb * MB
    assert slots is None or len(kept) <= slots
    one_more = entries[-len(kept) - 1 :] if len(kept) < len(entries) else []
    assert not one_more or sum(map(strip_bytes, one_more)) > budget_mb * MB or len(one_more) > (slots or len(entries))
