"""Gaps with plain-language meanings, findings, dead ends, and the closing of the books.

Each rule that refuses a number must be recognised by the words that the refusing code really uses, and must have its own sentence in the report.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.admission import decide
from lab.books import BooksError
from lab.evidence import check
from lab.matrix import Matrix, build_matrix
from lab.record import GateResult, Status, WorkerResult
from lab.report.capacity import NO_CAPACITY
from lab.report.claims import judge_claims
from lab.report.closing import Sum, sums
from lab.report.findings import spans
from lab.report.gaps import RULES, GapGroup, gap_groups, rule_of
from lab.report.verdicts import judge
from lab.standing import Mark
from tests.matrix_helpers import PROVENANCE, cell, complete, compose, measured, record, small
from tests.report.support import EN, ZH, section, stage, stage_text, text_of


def refusals(metrics: dict[str, Any], **evidence: Any) -> dict[str, tuple[Status, str]]:
    """The gaps that admission makes of these measurements, beside one that stands."""
    result = WorkerResult(status=Status.OK, metrics={"load_s": measured("load_s", 1.0), **metrics}, evidence=evidence)
    return decide(cell(), result, lambda _cell, _evidence: []).gaps


def worded() -> dict[str, tuple[Status, str]]:
    """A reason for every rule, each from the code that refuses."""
    tg = measured("tg128_tok_s", 100.0)
    lengths = {"realised_tokens": 100, "requested_tokens": 512}
    rule = SimpleNamespace(component="experts", op="q2", residency=1.0)
    path = SimpleNamespace(name="fine", evidence=(rule,), components={}, format=None)
    judged = cast(
        Any, SimpleNamespace(path=path, layers=1, engine="local", device=SimpleNamespace(torch_device="cpu"), placement=None, mode="auto", disable=None)
    )
    seen: dict[str, Any] = {
        "layers": 1, "component_layers": {"experts": [0]}, "source_codecs": {}, "weights": {"experts": 10}, "rows_per_token": [], "tokens_forwarded": 1,
        "resident": [{"component": "experts", "codec": "q2", "device": "cpu", "weights": 4}],
        "ops": [{"component": "experts", "layer": 0, "op": "bf16", "calls": 1, "rows": 1, "device": "cpu"}],
    }  # fmt: skip
    fallback, residency = check(judged, seen)
    infinite = "a divergence is not finite: the path gives zero probability where the reference does not"
    return {
        "fallback_op": fallback,
        "residency": residency,
        "not_finite": (Status.NUMERIC_INVALID, infinite),
        "impossible": refusals({"ppl": measured("ppl", 0.5)})["ppl"],
        "beside_invalid": refusals({"ppl": measured("ppl", 0.5), "tg128_tok_s": tg})["tg128_tok_s"],
        "above_bound": refusals({"tg128_tok_s": measured("tg128_tok_s", 100.0, roofline_pct=130.0)})["tg128_tok_s"],
        "above_vocabulary": refusals({"ppl": measured("ppl", 5000.0)}, vocab_size=2560)["ppl"],
        "zero_spread": refusals({"tg128_tok_s": measured("tg128_tok_s", 100.0, spread=0.0)})["tg128_tok_s"],
        "zero_rate": refusals({"tg128_tok_s": measured("tg128_tok_s", 0.0)})["tg128_tok_s"],
        "realised_lengths": refusals({"pp512_tok_s": measured("pp512_tok_s", 100.0, details=lengths)})["pp512_tok_s"],
        "aggregate_below_single": refusals({"tg128_tok_s": tg, "agg4_tg128_tok_s": measured("agg4_tg128_tok_s", 50.0)})["agg4_tg128_tok_s"],
    }


@pytest.mark.parametrize(("rule", "refusal"), worded().items())
def test_a_rule_is_recognised_by_the_words_of_the_code_that_refuses(rule: str, refusal: tuple[Status, str]) -> None:
    assert rule_of(*refusal) == rule


def test_every_rule_is_met_by_some_code() -> None:
    assert {*worded(), "depth_inversion"} == set(RULES)
    assert rule_of(Status.OOM, "no memory left: 3 of 4 GiB resident") is None


@pytest.mark.parametrize("lang", [EN, ZH])
def test_each_rule_met_has_its_own_sentence_in_the_report(tmp_path: Path, lang: Any) -> None:
    experiment = small(tmp_path)
    for rule, (status, reason) in worded().items():
        text = text_of(build_matrix(experiment, [record(cell("fine"), status=status, reason=reason)], compose), lang.code)
        assert lang(f"rule.{rule}") in section(text, 6) and lang.gloss(status) in section(text, 6)
        assert sum(lang(f"rule.{other}") in section(text, 6) for other in RULES) == 1


def test_a_flag_over_measured_cells_is_a_gap_told_in_both_languages(tmp_path: Path) -> None:
    deep = [complete(cell("fine", 3), 0.1, speed=50.0), complete(cell("fine", 6), 0.1, speed=100.0)]
    matrix = build_matrix(small(tmp_path), deep, compose)
    assert [flag.rule for flag in matrix.flags] == ["depth_inversion"]
    for lang in (EN, ZH):
        shown = text_of(matrix, lang.code)
        sentence = matrix.flags[0].sentence(lang.code)
        assert sentence in section(shown, 9).replace("\\", "") and sentence in section(shown, 6).replace("\\", "")
        assert lang("rule.depth_inversion") in section(shown, 6)
    assert "100 [" not in text_of(matrix), "a flagged rate is shown nowhere"


def test_findings_tell_what_was_set_aside_forced_changed_and_noted(tmp_path: Path) -> None:
    experiment = small(tmp_path)
    of = cell("fine")
    old = {**PROVENANCE, "experiments": {"small": "ab" * 32}}
    forced = GateResult(gate="capacity", outcome="forced", detail="short by 3 GiB")
    records = [
        complete(of, 0.1, attempt=1, provenance=old),
        complete(of, 0.1, attempt=2, notes=["clocks were unsteady"], gates=[forced]),
        record(of, status=Status.OOM, attempt=3, reason="no memory left"),
        complete(cell("coarse"), 0.2, attempt=1),
    ]
    marks = {(cell("coarse").id, 1): (Mark(what="invalidated", reason="the fan stopped", at="2026-08-02T00:00:00+00:00", by="someone"),)}
    text = text_of(build_matrix(experiment, records, compose, marks=marks))
    told = section(text, 9)
    for line in (
        "- fine, 3 layers: attempts 3 ended OOM: no memory left",
        "- coarse, 3 layers: attempts 1 - INVALIDATED: the fan stopped",
        "- Superseded by a newer attempt: fine, 3 layers (attempts 1, 3).",
        "- fine, 3 layers: capacity: short by 3 GiB",
        "- fine, 3 layers: clocks were unsteady",
        "sha256 abababababab (now " + experiment.sha256[:12] + "): 1 records, first started 2026-08-01T10:01:00",
    ):
        assert line in told
    assert "**The experiment file changed after the first record**" in text.split("## 1.")[0]
    assert "1 invalidated" in section(text, 12) and "the fan stopped" in section(text, 6)
    quiet = text_of(build_matrix(experiment, [], compose))
    assert "None: no changed experiment file" in section(quiet, 9) and "changed after" not in quiet.split("## 1.")[0]


def test_a_dead_end_says_what_it_closes_and_what_was_forced_past_it() -> None:
    matrix = stage("flash_next_r9700")
    cold = next(row.cell for row in matrix.rows if row.point["path"] == "cpu_cold" and row.point["layers"] == "3")
    assert "No attempt was forced past it." in section(stage_text("flash_next_r9700"), 7)
    assert "Measured all the same" not in stage_text("flash_next_r9700")
    gate = GateResult(gate="dead_end", outcome="forced", detail="dead end cpu-cold-experts")
    again = stage("flash_next_r9700", [record(cold, {"tg128_tok_s": measured("tg128_tok_s", 40.0)}, gates=[gate])])
    told = section(text_of(again), 7)
    assert "Closes 4 expected cells" in told and r"Measured all the same (force=true): cpu_cold, 3 layers (attempts 1)." in told


@given(st.sets(st.integers(1, 60)))
def test_spans_name_exactly_their_numbers(numbers: set[int]) -> None:
    found: set[int] = set()
    for part in filter(None, spans(numbers).split(", ")):
        low, _, high = part.partition("-")
        found |= set(range(int(low), int(high or low) + 1))
    assert found == numbers


def closed(matrix: Matrix, groups: list[GapGroup]) -> list[str]:
    judged = [judge(matrix, hypothesis, EN) for hypothesis in matrix.experiment.hypotheses]
    return [item.text(EN) for item in sums(matrix, groups, [], judged, judge_claims(matrix, NO_CAPACITY, EN))]


def test_a_gap_that_is_lost_on_the_way_to_the_page_stops_the_report(tmp_path: Path) -> None:
    matrix = build_matrix(small(tmp_path), [complete(cell("fine", 6), 0.1), record(cell("coarse"), status=Status.OOM)], compose)
    groups = gap_groups(matrix, EN)
    assert {group.status for group in groups} == {Status.NOT_RUN, Status.OOM} and sum(group.count for group in groups) == 20
    assert closed(matrix, groups)[0] == "24 expected = 4 measured + 20 gaps"
    with pytest.raises(BooksError, match="expected"):
        closed(matrix, groups[:1])


def test_copies_of_a_record_are_told_in_the_closing(tmp_path: Path) -> None:
    one = complete(cell("fine"), 0.1)
    matrix = build_matrix(small(tmp_path), [one, one.model_copy(update={"attempt": 2})], compose)
    assert "2 attempts on record = 1 current + 1 copies" in section(text_of(matrix), 12)
    assert "在案尝试 2 = 现行 1 + 副本 1" in section(text_of(matrix, "zh"), 12)


def test_a_sum_tells_only_parts_that_count() -> None:
    assert Sum("attempts", 3, {"current": 1, "superseded": 2, "stale": 0}, ("current",)).text(EN) == "3 attempts on record = 1 current + 2 superseded"
    assert Sum("attempts", 0, {"current": 0, "superseded": 0}).text(EN) == "0 attempts on record = 0 current"
    with pytest.raises(BooksError):
        Sum("attempts", 4, {"current": 1}).text(EN)
