"""The two stages the lab was made for: every figure of the posts is there with its source, the flags are raised, the books close.

On a machine without the artefacts nothing is measured; then no figure may stand anywhere but as a reported one.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from lab.errors import LabError
from lab.experiment import load_experiment
from lab.matrix import Matrix
from lab.project import Project
from lab.registered import SECTIONS, in_language
from lab.report.build import assess, render, report_name
from lab.report.capacity import NO_CAPACITY, Capacity, load_capacity
from lab.report.charts import draw
from lab.report.claims import judge_claims
from lab.report.cli import load_matrix
from lab.report.outline import outline
from tests.report.support import EN, EXPERIMENTS, ZH, named_section, section, stage, stage_text, table_cells, table_rows, text_of

POST_TABLE = {
    ("paiton_native", 3): ("174.28", "6485", "74.78"),
    ("paiton_native", 6): ("163.51", "5128", "67.48"),
    ("paiton_native", 24): ("243.32", "1465", "65.08"),
    ("tiered placement.resident_layers=20", 48): ("5.78", "156", "3.37"),
    ("tiered placement.resident_layers=20 mode=eager", 48): ("5.34", "156", "3.49"),
    ("strata_server", 48): ("74", "2069", "–"),
}
"""TG, PP and 4-way of the first post's table, by our cell."""


@pytest.fixture(scope="module")
def flash() -> Matrix:
    return stage("flash_next_r9700")


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {language: stage_text("flash_next_r9700", language) for language in ("en", "zh")}


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_cell_of_the_posts_table_is_present_as_reported(texts: dict[str, str], language: str) -> None:
    part = section(texts[language], 2)
    for (path, layers), figures in POST_TABLE.items():
        depth = (EN if language == "en" else ZH)("depth", layers=layers)
        rows = table_rows(part.split(f"### {depth}\n")[1].split("\n### ")[0])
        header, line = rows[0], next(row for row in rows if row[0] == path)
        for name, figure in zip(("TG", "PP", "4-way"), figures, strict=True):
            reported = line[header.index((EN if language == "en" else ZH)("column.reported", what=name))]
            assert re.sub(r" \[.*\]", "", reported) == figure
            assert line[header.index(f"{name}, tok/s")] == "*NOT_RUN*"


@pytest.mark.parametrize(("name", "language"), [(n, code) for n in ("flash_next_r9700", "kestrel_8b") for code in ("en", "zh")])
def test_every_claim_stands_with_source_unknowns_and_void_reason(name: str, language: str) -> None:
    matrix = stage(name)
    whole = stage_text(name, language)
    part = named_section(whole, matrix, language, "claims").replace("\\", "")
    told = part if not matrix.experiment.chapters else named_section(whole, matrix, language, "facts").replace("\\", "")
    for claim in matrix.experiment.claims:
        assert f"{claim.value:.10g}" in part
        for text in (claim.what, claim.source, claim.unknown, *([claim.void] if claim.void else [])):
            assert " ".join(in_language(text, language).split()) in part
        if claim.void:
            assert f"~~{claim.value:.10g}~~ {claim.unit}" in part
    for fact in matrix.experiment.facts:
        assert in_language(fact.value, language) in told and in_language(fact.source, language) in told


@pytest.mark.parametrize("language", ["en", "zh"])
def test_what_the_first_post_does_not_explain_is_flagged(texts: dict[str, str], language: str) -> None:
    """TG of 174 / 163 / 243 at 3 / 6 / 24 layers, and four ways together below one alone."""
    lines = [line for line in section(texts[language], 8).splitlines() if line.startswith("- **F")]
    unexplained = "**not explained by the source**" if language == "en" else "**来源未解释**"
    assert all(unexplained in line for line in lines)
    for pair in (("243.3", "174.3"), ("243.3", "163.5"), ("74.78", "174.3"), ("67.48", "163.5"), ("65.08", "243.3"), ("3.37", "5.78"), ("3.49", "5.34")):
        assert sum(all(f"{figure} tok/s" in line for figure in pair) for line in lines) == 1
    assert len(lines) == 7


def test_a_claim_above_the_physical_bound_is_flagged_and_a_void_one_casts_no_doubt(flash: Matrix) -> None:
    row = next(r for r in flash.rows if r.point["path"] == "paiton_native" and r.point["layers"] == "24")
    bounds = cast(Any, SimpleNamespace(tg_bound_tok_s=206.0, pp_bound_tok_s=None, agg4_bound_tok_s=None, basis="bytes over bandwidth"))
    capacity = Capacity(ledgers={row.key: bounds}, vocabularies={"flash_next": 3000})
    found = {(flag.rule, flag.names) for _, flag in judge_claims(flash, capacity, EN).flags}
    assert ("above_bound", ("resident-24-tg",)) in found
    assert ("above_vocabulary", ("q2-ppl",)) in found, "a void claim is judged alone, and by the rules of one number"
    assert not any("table-ppl" in names or (len(names) > 1 and "q2-ppl" in names) for _, names in found)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_without_records_no_figure_stands_outside_the_reported_columns(texts: dict[str, str], language: str) -> None:
    marks = ("layers", "层", "tok/s", "reported", "据称", "KLD", "R9700")
    for number in (1, 3, 4, 5):
        for part in table_cells(section(texts[language], number)):
            assert not re.search(r"\d", part) or any(mark in part for mark in marks) or part.startswith("`")
    for rows in (table_rows(piece) for piece in section(texts[language], 2).split("### ")):
        for at, heading in enumerate(rows[0] if rows else []):
            if "reported" not in heading and "据称" not in heading and at > 0:
                assert all(not re.search(r"\d", row[at]) for row in rows[1:])


@pytest.mark.parametrize("name", ["flash_next_r9700", "kestrel_8b"])
def test_targets_hypotheses_dead_ends_and_boundaries_are_all_told(name: str) -> None:
    matrix = stage(name)
    for language in ("en", "zh"):
        text = stage_text(name, language).replace("\\", "")
        in_section = {part: named_section(text, matrix, language, part) for part in ("verdicts", "targets", "hypotheses", "dead_ends", "boundaries")}
        for hypothesis in matrix.experiment.hypotheses:
            assert in_language(hypothesis.statement, language) in in_section["hypotheses"] and f"`{hypothesis.id}`" in in_section["verdicts"]
        for dead_end in matrix.experiment.dead_ends:
            for told in (dead_end.what, dead_end.evidence, dead_end.reopen, dead_end.source, dead_end.since):
                assert " ".join(in_language(told, language).split()) in in_section["dead_ends"]
        for target in matrix.experiment.targets:
            assert f"{target.comparison} {target.value:g}" in in_section["verdicts"] and in_language(target.source, language) in in_section["targets"]
        for boundary in matrix.experiment.boundaries:
            assert in_language(boundary, language) in in_section["boundaries"]
    assert f"{matrix.totals.expected} expected = 0 measured + {matrix.totals.gaps} gaps" in stage_text(name)


@pytest.mark.parametrize("name", ["flash_next_r9700", "kestrel_8b"])
def test_the_committed_reports_are_what_no_records_give_today(name: str, tmp_path: Path) -> None:
    """`python -m lab report experiment=NAME lang=en|zh` writes them; an edit of the code, the texts, the stage or the sizes asks for that again."""
    project = Project(root=EXPERIMENTS.parent, runs=tmp_path)
    matrix = load_matrix(project, name)
    capacity = load_capacity(project, matrix)
    for lang in (EN, ZH):
        assessed = assess(matrix, lang, capacity)
        drawn = draw(matrix, assessed.verdicts, assessed.targets, assessed.claims, capacity)
        committed = EXPERIMENTS.parent / "reports" / report_name(name, lang.code)
        assert committed.read_text(encoding="utf-8") == render(assessed, drawn), f"{committed.name} is out of date: write it again"


def test_claims_are_counted_by_what_stands_beside_them(flash: Matrix, texts: dict[str, str]) -> None:
    claims = judge_claims(flash, NO_CAPACITY, EN).items
    beside = sum(item.ours is not None for item in claims)
    assert f"{len(claims)} reported claims = {beside} beside a gap + {len(claims) - beside} about no cell" in texts["en"]


def test_the_second_stage_is_told_in_the_posts_own_order() -> None:
    """Its sections, 1 to 6 with 3.1 and 3.2, by the words of their titles; what it has no section for comes after them, and nothing is left away."""
    text = stage_text("kestrel_8b", "zh")
    found = re.findall(r"^(?:## (?=\d+\. )|### (?=\d+\.\d+ ))([\d.]*\d)\.? (.+)$", text, re.MULTILINE)
    posts = {"1": "问题与结论", "2": "为什么要走这一步", "3": "核心机制", "3.1": "布局标志不匹配", "3.2": "双侧都要配足"}
    posts |= {"4": "实测数据", "5": "边界与已知限制", "6": "小结"}
    titles = dict(found)
    assert all(words in titles[number] for number, words in posts.items())
    assert [number for number, _ in found][: len(posts) + 1] == ["1", "2", "3", "3.1", "3.2", "4", "4.1", "4.2", "4.3"]
    sections = [heading.section for part in outline(stage("kestrel_8b").experiment.chapters) for heading in part.headings]
    assert sorted(sections) == sorted(SECTIONS)
    assert "第 4.3 节列出补齐每个缺口的命令" in text, "texts point to where a section is now"


def test_budgets_that_are_too_small_are_predicted_to_degrade() -> None:
    matrix = stage("kestrel_8b")
    text = text_of(matrix, "en", load_capacity(Project(root=EXPERIMENTS.parent, runs=Path("runs")), matrix)).replace("\\", "")
    part = named_section(text, matrix, "en", "capacity")
    for budget, kept in ((4096, 136), (7168, 240)):
        line = next(one for one in part.splitlines() if f"host: placement.host_budget_mb={budget}" in one)
        assert f"only {kept} of 252 weights" in line and "DEGRADED" in line
    assert "252 of 252 weights stay resident (host: placement.host_budget_mb=8192" in part


@pytest.mark.parametrize(
    ("chapters", "message"),
    [
        ([{"title": "A", "sections": {"prose": None}}], "no section prose; choose from: verdicts"),
        ([{"title": "A", "sections": {"gaps": None}}, {"title": "B", "sections": {"gaps": None}}], "section gaps is in 2 chapters"),
        ([{"title": "A", "sections": {}}], "at least 1"),
    ],
)
def test_chapters_name_known_sections_once(tmp_path: Path, chapters: list[Any], message: str) -> None:
    data = yaml.safe_load((EXPERIMENTS / "kestrel_8b.yaml").read_text(encoding="utf-8"))
    (tmp_path / "kestrel_8b.yaml").write_text(yaml.safe_dump({**data, "chapters": chapters}, allow_unicode=True), encoding="utf-8")
    with pytest.raises(LabError, match=message):
        load_experiment("kestrel_8b", tmp_path)
