"""Suggestions: each fits when recomputed, and one slot or layer more does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.capacity import Ledger, PastOom, estimate_with_memory, judge, largest_tiers, ledgers, what_would_fit
from lab.cell import Cell
from lab.compose import compose_cells
from lab.project import Project
from tests.capacity.helpers import in_process
from tests.runner_helpers import make_project

__all__ = ["in_process"]
pytestmark = pytest.mark.usefixtures("in_process")
GIB = 1 << 30
NATIVE = ("model=flash_next", "path=paiton_native", "layers=12", "device=r9700")
MEMORY = 24 * GIB


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path / "p")


def composed(project: Project, *words: str) -> Cell:
    return compose_cells(words, project)[0]


def ledger(project: Project, *words: str) -> Ledger:
    cell = composed(project, *words)
    found = ledgers(project, [cell])[cell.hash]
    assert isinstance(found, Ledger)
    return found


def fits(project: Project, *words: str, host: int | None = None) -> bool:
    return judge(ledger(project, *words), MEMORY, host).short_by_bytes == 0


def changed(words: tuple[str, ...], changes: tuple[str, ...]) -> tuple[str, ...]:
    keys = {change.split("=")[0] for change in changes}
    return (*(word for word in words if word.split("=")[0] not in keys), *changes)


def test_every_suggestion_is_a_command_that_fits(project: Project) -> None:
    found = what_would_fit(project, composed(project, *NATIVE), MEMORY, 200 * GIB)
    assert not fits(project, *NATIVE)
    for suggestion in found:
        again = ledger(project, *changed(NATIVE, suggestion.words))
        assert (again.device_bytes, again.host_bytes) == (suggestion.device_bytes, suggestion.host_bytes)
        assert judge(again, MEMORY, 200 * GIB).fits
    kinds = {suggestion.words[-1].split("=")[0] for suggestion in found}
    assert {"layers", "path", "placement.slots", "placement.resident_layers", "path.components.ple.placement"} <= kinds
    assert {s.remark for s in found if s.words == ("path=cpu_cold",)} == {""}


def test_one_slot_or_layer_more_does_not_fit(project: Project) -> None:
    memory_words = ("placement.slots", "placement.resident_layers", "layers")
    numbered = [s.words for s in what_would_fit(project, composed(project, *NATIVE), 13 * GIB, None) if s.words[-1].split("=")[0] in memory_words]
    assert len(numbered) == 3
    for words in numbered:
        key, _, number = words[-1].partition("=")
        here = ledger(project, *changed(NATIVE, words))
        beyond = ledger(project, *changed(NATIVE, (*words[:-1], f"{key}={int(number) + 1}")))
        assert here.device_bytes <= 13 * GIB < beyond.device_bytes


def test_a_host_that_is_too_small_rules_a_way_out_and_an_unknown_one_does_not(project: Project) -> None:
    cell = composed(project, *NATIVE)
    small = {s.words for s in what_would_fit(project, cell, MEMORY, 8 * GIB)}
    unknown = {s.words for s in what_would_fit(project, cell, MEMORY, None)}
    assert ("path.components.ple.placement=host",) in unknown - small
    assert what_would_fit(project, cell, None, None) == []


def test_the_largest_tier_is_found_for_a_path_that_is_tiered_already(project: Project) -> None:
    cell = composed(project, "model=flash_next", "path=tiered", "layers=48", "device=r9700", "placement.slots=3")
    found = {s.words for s in largest_tiers(project, cell, 32 * GIB, None)}
    # The post ran "all 48 + tier 20" on this card.
    assert ("placement.resident_layers=20",) in found
    assert {s.words for s in largest_tiers(project, cell, 139 * GIB, None)} == {("placement.slots=512",), ("placement.resident_layers=48",)}
    assert largest_tiers(project, composed(project, "model=qwen3_8b", "path=kestrel_vqf", "device=rtx5090"), GIB, None) == []


def test_earlier_failures_make_suggestions_smaller(project: Project) -> None:
    cell = composed(project, "model=flash_next", "path=tiered", "layers=48", "device=r9700")
    past = [PastOom("flash_next", "tiered", "r9700", 24, "device", 10 * GIB, 12 * GIB)]
    plain, raised = (largest_tiers(project, cell, 32 * GIB, None, failures)[0] for failures in ([], past))
    number, fewer = (int(s.words[-1].split("=")[1]) for s in (plain, raised))
    assert 0 < fewer < number
    again = ledger(project, "model=flash_next", "path=tiered", "layers=48", "device=r9700", f"placement.slots={fewer}")
    assert estimate_with_memory(again, past).device.bytes <= 32 * GIB
