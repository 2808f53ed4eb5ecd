"""The post's sums, derived from sizes: what follows, what is close, and what cannot be derived."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.capacity import ACCOUNT_PARTS, DerivedTerm, derive
from lab.errors import LabError
from lab.project import Project
from lab.registered import Account
from tests.capacity.helpers import in_process
from tests.runner_helpers import make_project

__all__ = ["in_process"]
pytestmark = pytest.mark.usefixtures("in_process")
EMBEDDED = {"label": "table and embedding", "reported": 48.9, "parts": {"ple": 8, "embed": 16}}
REST = {"label": {"en": "rest", "zh": "其余"}, "reported": 8, "parts": {"trunk": 16, "head": 16, "small": 16, "vectors": 16}}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path / "p")


def derived(project: Project, terms: list[dict[str, object]], total: float, **changes: object) -> list[DerivedTerm]:
    data = {"id": "a", "statement": "s", "source": "post", "model": "flash_next", "layers": 48, "unit": "GiB", "terms": terms, "total": total}
    return derive(project, Account.model_validate({**data, **changes}))


def test_the_two_bit_account_is_derived_but_for_its_experts(project: Project) -> None:
    found = derived(project, [{"label": "experts", "reported": 31.7, "parts": {"experts": 2.25}}, EMBEDDED, REST], 88.6)
    assert [t.word for t in found] == ["close", "derived", "derived", "close"]
    assert [round(t.gib or 0, 2) for t in found] == [31.64, 48.87, 8.03, 88.54]
    assert [t.is_total for t in found] == [False, False, False, True]
    assert found[2].label == REST["label"]
    assert found[0].sentence() == "31.7 GiB: close, 31.64 GiB = 33.97 GB, -0.06 GiB"
    assert found[1].sentence() == "48.9 GiB: derived, 48.87 GiB = 52.47 GB"


@pytest.mark.parametrize("bits", [3, 3.125])
def test_the_three_bit_account_is_not_derivable(project: Project, bits: float) -> None:
    found = derived(project, [{"label": "experts", "reported": 39.5, "parts": {"experts": bits}}, EMBEDDED, REST], 96.4)
    assert found[0].word == "not derivable"
    assert found[0].bits_needed == pytest.approx(2.81, abs=0.005)
    assert f"experts would have to take 2.81 bits per weight instead of {bits:g}" in found[0].sentence()
    assert found[-1].word == "not derivable"
    assert found[-1].sentence().startswith("96.4 GiB: not derivable, the parts give ")


def test_what_is_left_over_is_that_of_the_largest_part(project: Project) -> None:
    whole = [{"label": "all", "reported": 96.4, "parts": {"experts": 3, "ple": 8, "embed": 16, "trunk": 16, "head": 16, "small": 16, "vectors": 16}}]
    (term, _) = derived(project, whole, 96.4)
    assert term.largest_part == "experts" and term.bits_needed == pytest.approx(2.81, abs=0.01)


def test_the_unit_decides(project: Project) -> None:
    terms: list[dict[str, object]] = [{"label": "table", "reported": 51.2, "parts": {"ple": 8}}]
    assert derived(project, terms, 51.2, unit="GB")[0].word == "derived"
    assert derived(project, terms, 51.2, unit="GiB")[0].word == "not derivable"


def test_a_term_without_parts_is_not_derivable_and_neither_is_its_total(project: Project) -> None:
    found = derived(project, [{"label": "x", "reported": 5}, EMBEDDED], 53.9)
    assert [t.word for t in found] == ["not derivable", "derived", "not derivable"]
    assert found[0].derived_bytes is None and found[-1].derived_bytes is None
    assert found[0].sentence() == "5 GiB: not derivable, no parts are named"


def test_the_8b_codes_are_seven_gb(project: Project) -> None:
    terms: list[dict[str, object]] = [{"label": "codes", "reported": 7, "parts": {"trunk": 8}}]
    assert derived(project, terms, 7, model="qwen3_8b", layers=36, unit="GB")[0].word == "derived"


def test_an_unknown_part_or_model_is_one_line(project: Project) -> None:
    with pytest.raises(LabError, match=rf"account a: no part 'router'; choose from: {', '.join(ACCOUNT_PARTS)}$"):
        derived(project, [{"label": "x", "reported": 5, "parts": {"router": 16}}], 5)
    with pytest.raises(LabError, match="model=other: no such model"):
        derived(project, [EMBEDDED], 5, model="other")
