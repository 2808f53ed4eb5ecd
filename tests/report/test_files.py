"""The files a report writes: the same for the same records, complete, and never measured values replaced by none."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

import lab.report.seal
from lab.errors import LabError
from lab.experiment import Experiment
from lab.matrix import Matrix, build_matrix
from lab.registered import matches
from lab.report.build import build_report
from lab.report.capacity import NO_CAPACITY
from lab.report.charts import draw
from lab.report.claims import judge_claims
from lab.report.html import page
from lab.report.seal import Seal, maker_sha256, outdated, read_seal, refuse_loss, seal_of
from lab.report.verdicts import judge, judge_target
from tests.matrix_helpers import SMALL, cell, complete, compose, measured, record, small
from tests.report.support import EN, ZH, ladder, stage

RICH = [*ladder({"reference": 0.0, "fine": 0.1, "coarse": 0.2}), *ladder({"reference": 0.0, "fine": 0.1}, layers=3)]


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    return small(tmp_path)


def charts_of(matrix: Matrix) -> dict[str, str]:
    experiment = matrix.experiment
    verdicts = [judge(matrix, hypothesis, EN) for hypothesis in experiment.hypotheses]
    targets = [judge_target(matrix, target) for target in experiment.targets]
    return draw(matrix, verdicts, targets, judge_claims(matrix, NO_CAPACITY, EN), NO_CAPACITY)


def test_the_report_is_the_same_for_the_same_records(experiment: Experiment, tmp_path: Path) -> None:
    first = build_report(build_matrix(experiment, RICH, compose), tmp_path / "a", EN)
    second = build_report(build_matrix(experiment, reversed(RICH), compose), tmp_path / "b", EN)
    assert [path.name for path in first] == ["small.md", "small.html", "small_ppl_by_depth.svg", "small_ladder.svg"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert b"<dc:date>" not in first[2].read_bytes()
    text = first[0].read_text(encoding="utf-8")
    assert "](small_ladder.svg)" in text and "](small_ppl_by_depth.svg)" in text
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(path.name for path in first)


def test_both_languages_stand_side_by_side_and_share_their_charts(experiment: Experiment, tmp_path: Path) -> None:
    matrix = build_matrix(experiment, RICH, compose)
    english = build_report(matrix, tmp_path / "r", EN)
    drawn = {path.name: path.read_bytes() for path in english[2:]}
    chinese = build_report(matrix, tmp_path / "r", ZH)
    assert [path.name for path in chinese[:2]] == ["small.zh.md", "small.zh.html"]
    assert {path.name: path.read_bytes() for path in chinese[2:]} == drawn
    assert english[0].exists() and read_seal(english[0]) == read_seal(chinese[0]) == seal_of(matrix)


def test_without_data_there_is_no_chart_and_an_old_one_goes(experiment: Experiment, tmp_path: Path) -> None:
    build_report(build_matrix(experiment, ladder({"reference": 0.0}), compose), tmp_path, EN)
    assert (tmp_path / "small_ladder.svg").exists()
    for name in ("other_ladder.svg", "small_extra.svg"):
        (tmp_path / name).write_text("somebody else's")
    (tmp_path / "small_target_7.svg").write_text("of a target that is gone")
    written = build_report(build_matrix(experiment, [], compose), tmp_path, EN)
    assert [path.name for path in written] == ["small.md", "small.html"]
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == ["other_ladder.svg", "small_extra.svg"]


def test_a_hypothesis_named_like_a_chart_is_refused(tmp_path: Path) -> None:
    matrix = build_matrix(small(tmp_path, SMALL.replace("id: ladder", "id: ppl_by_depth")), RICH, compose)
    with pytest.raises(LabError, match="the id 'ppl_by_depth' is the name of a chart"):
        charts_of(matrix)


def test_a_stage_without_records_draws_its_claims_and_its_gaps() -> None:
    matrix = stage("flash_next_r9700")
    drawn = charts_of(matrix)
    assert list(drawn) == ["tg_by_depth", "target_1", "target_2", "target_3", "target_4"]
    target = matrix.experiment.targets[0]
    cells = sum(matches(row.point, target.where) for row in matrix.rows)
    outside = {(c.where["path"], c.where["layers"]) for c in matrix.experiment.claims if c.quantity == "tg" and c.where and c.where["layers"] != 48}
    # One hatched slot for each gap: hatching is a pattern fill, and nothing else in the chart has one.
    assert len(re.findall(r"fill: url\(#", drawn["target_1"])) == cells + len(outside)
    assert charts_of(stage("kestrel_8b")) == {}


def test_targets_and_quality_are_drawn_where_something_is_measured(tmp_path: Path) -> None:
    text = SMALL.replace("expert_cosine]", "expert_cosine, resident_bytes, tg128_tok_s]")
    text += "targets:\n  - {metric: pp512_tok_s, comparison: '>=', value: 90, unit: tok/s, source: the post, where: {layers: 6}}\n"
    speeds = {"tg128_tok_s": measured("tg128_tok_s", 40.0, roofline_pct=20.0)}
    records = []
    for size, (path, kld) in enumerate({"reference": 0.0, "fine": 0.1}.items(), start=1):
        of = cell(path, 6)
        held = {**complete(of, kld).metrics, **speeds, "resident_bytes": measured("resident_bytes", size * 1e6)}
        records.append(record(of, held))
    records.append(record(cell("coarse", 6), {"resident_bytes": measured("resident_bytes", 3e6)}))
    drawn = charts_of(build_matrix(small(tmp_path, text), records, compose))
    assert set(drawn) == {"tg_by_depth", "quality_by_bytes", "target_1", "ladder"}
    one_size = [record(cell(r.cell["path"]["name"], 6), {**r.metrics, "resident_bytes": measured("resident_bytes", 1e6)}) for r in records[:2]]
    assert "quality_by_bytes" not in charts_of(build_matrix(small(tmp_path, text), one_size, compose))


class Page(HTMLParser):
    """What the tests ask of a page: its ids, links, headings, and the elements that stand open around each table and drawing."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.boxed: list[bool] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.ids += [str(given["id"])] if "id" in given else []
        self.links += [str(value) for name, value in attrs if name in {"href", "xlink:href", "src"}]
        if tag in {"table", "svg"}:
            self.boxed.append(any("wide" in classes for _, classes in self.open))
        if tag not in {"meta", "br", "hr", "img"}:
            self.open.append((tag, given.get("class") or ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        standing = len(self.open)
        self.handle_starttag(tag, attrs)
        del self.open[standing:]

    def handle_endtag(self, tag: str) -> None:
        opened, _ = self.open.pop()
        assert opened == tag, f"</{tag}> closes <{opened}>"


@pytest.fixture(params=["small", "flash_next_r9700"])
def pages(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The Markdown and the page of a report with values, and of one with claims and gaps alone."""
    matrix = build_matrix(small(tmp_path), RICH, compose) if request.param == "small" else stage(request.param)
    markdown, html, *_ = build_report(matrix, tmp_path / "out", ZH if request.param == "small" else EN)
    yield markdown.read_text(encoding="utf-8"), html.read_text(encoding="utf-8")


def test_the_page_is_whole_self_contained_and_boxes_what_is_wide(pages: tuple[str, str]) -> None:
    markdown, html = pages
    found = Page(html)
    assert found.open == [] and len(found.ids) == len(set(found.ids))
    assert not {"script", "link", "img", "iframe"} & set(found.tags)
    assert all(link.startswith("#") for link in found.links) and not re.search(r"@import|url\((?!['\"]?#)", html)
    assert {link[1:] for link in found.links} <= set(found.ids)
    assert all(found.boxed) and found.tags.count("table") == len(re.findall(r"^\|[ :|-]+\|$", markdown, re.MULTILINE))
    assert found.tags.count("svg") == markdown.count(".svg)") and found.tags.count("h2") == 12
    assert "lab-report" not in html and "<!--" not in html.split("<svg")[0]


def test_the_page_says_what_the_markdown_says(pages: tuple[str, str]) -> None:
    markdown, html = pages
    bare = re.sub(r"\s+", " ", re.sub(r"<svg.*?</svg>|<[^>]+>", " ", html, flags=re.DOTALL))
    for status in set(re.findall(r"\*([A-Z_]{3,})\*", markdown)):
        assert status in bare
    for figure in re.findall(r"\b\d+\.\d{2,}\b", "\n".join(line for line in markdown.splitlines() if line.startswith("|"))):
        assert figure in bare
    if "~~142.6~~" in markdown:
        assert re.search(r"<(s|del)>142\.6</\1>", html)


def test_markup_in_free_text_does_not_reach_the_page() -> None:
    found = Page(page("# a <script>x</script>\n\n<img src=http://h>\n\n![c](other.svg)\n", {}, "en"))
    assert "script" not in found.tags and found.links == ["other.svg"]


def write_report(file: Path, measured_values: int | None) -> None:
    seal = "" if measured_values is None else Seal("small", 24, measured_values, "d").line
    file.write_text(f"made elsewhere\n{seal}\n", encoding="utf-8")


@pytest.mark.parametrize(("before", "now", "lost"), [(4, 0, True), (None, 0, True), (0, 0, False), (4, 1, False), (None, 1, False)])
def test_only_measured_values_are_protected_from_a_report_without_any(tmp_path: Path, before: int | None, now: int, lost: bool) -> None:
    file = tmp_path / "small.md"
    write_report(file, before)
    new = Seal("small", 24, now, "e")
    if lost:
        what = "shows 4 measured values" if before else "does not say what it shows"
        with pytest.raises(
            LabError, match=rf"^no record here fills a cell of small, and reports/small.md {what}; it is left as it is, with its charts: .*delete it"
        ) as refused:
            refuse_loss({"reports/small.zh.md": tmp_path / "small.zh.md", "reports/small.md": file}, new, 0)
        assert "\n" not in str(refused.value)
    else:
        refuse_loss({"reports/small.zh.md": tmp_path / "small.zh.md", "reports/small.md": file}, new, 0)


def test_the_seal_is_read_back_and_a_spoilt_one_is_none(tmp_path: Path, experiment: Experiment) -> None:
    file = tmp_path / "r.md"
    seal = seal_of(build_matrix(experiment, RICH, compose))
    assert (seal.measured, seal.expected) == (20, 24) and seal != seal_of(build_matrix(experiment, RICH[:1], compose))
    spoilt = (f"{seal.line}\nmore\n", "<!-- lab-report {oops} -->", '<!-- lab-report {"a": 1} -->')
    for text, expected in ((f"x\n{seal.line}\n", seal), *((text, None) for text in spoilt)):
        file.write_text(text, encoding="utf-8")
        assert read_seal(file) == expected


def test_a_report_made_by_other_templates_or_before_there_were_seals_is_noticed(
    tmp_path: Path, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = seal_of(build_matrix(experiment, RICH, compose))
    assert new.made_by == maker_sha256() and outdated(new, new) == ""
    assert outdated(None, new) == "does not say what it was made from"
    assert outdated(replace(new, digest="other"), new) == "was made from other records or another experiment file"
    old = re.sub(r', "made_by": "[0-9a-f]*"', "", new.line)
    (tmp_path / "old.md").write_text(old, encoding="utf-8")
    assert old != new.line and outdated(read_seal(tmp_path / "old.md"), new) == "was made by other report code, templates or texts"
    package = tmp_path / "report"
    shutil.copytree(Path(lab.report.seal.__file__).parent, package)
    monkeypatch.setattr(lab.report.seal, "__file__", str(package / "seal.py"))
    found = [maker_sha256.__wrapped__()]
    assert found == [new.made_by], "the digest does not depend on where the package lies"
    for made in ("templates/report.md.j2", "lang/zh.yaml", "measured.py"):
        with (package / made).open("a", encoding="utf-8") as file:
            file.write("\n")
        found.append(maker_sha256.__wrapped__())
    assert len(set(found)) == 4


def test_a_report_whose_attempts_were_all_withdrawn_may_take_its_numbers_down(tmp_path: Path) -> None:
    file = tmp_path / "small.md"
    file.write_text("a report without a seal\n")
    nothing = seal_of(build_matrix(small(tmp_path), [], compose))
    refuse_loss({"reports/small.md": file}, nothing, 1)
    with pytest.raises(LabError, match="does not say what it shows"):
        refuse_loss({"reports/small.md": file}, nothing, 0)


def test_the_contents_of_a_page_name_sections_and_those_inside_chapters() -> None:
    found = Page(page("# t\n\n## 3. Chapter\n\n### 3.1 Section\n\n#### Part\n\n## 4. Other\n\n### 6 layers\n", {}, "en"))
    assert found.links == ["#3-chapter", "#31-section", "#4-other"]
