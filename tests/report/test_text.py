"""The report's text: nothing expected is missing, no gap looks like a number, no number comes from nowhere.

Texts are checked for what a reader relies on, not word by word.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.experiment import Experiment
from lab.matrix import Unreadable, build_matrix
from lab.record import Gap, Status
from lab.report.markup import Table, code, escape, table, width
from lab.report.numbers import number, short, significant, with_error
from tests.matrix_helpers import PROVENANCE, cell, complete, compose, record, small
from tests.report.support import ladder, section, stage_text, table_cells, text_of


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    return small(tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_expected_cell_and_every_fill_command_is_in_the_report(experiment: Experiment, language: str) -> None:
    records = [*ladder({"fine": 0.1}), record(cell("coarse"), status=Status.OOM, reason="no memory left")]
    matrix = build_matrix(experiment, records, compose)
    text = text_of(matrix, language)
    for row in matrix.rows:
        assert row.cell.id in text
    for entry in matrix.entries.values():
        if entry.gap:
            assert f"`{entry.gap.fill}`" in text and str(entry.gap.status) in text
    assert "no memory left" in text
    assert ("24 expected = 4 measured + 20 gaps" if language == "en" else "预期 24 = 实测 4 + 缺口 20") in text


def test_a_gap_never_renders_as_a_number(experiment: Experiment) -> None:
    ended = {("fine", 3): Status.OOM, ("fine", 6): Status.TIMEOUT, ("coarse", 3): Status.UNSUPPORTED}
    records = [record(cell(path, layers), status=status) for (path, layers), status in ended.items()]
    matrix = build_matrix(experiment, records, compose)
    assert all(short(entry) == f"*{entry.gap.status}*" for entry in matrix.entries.values() if entry.gap)
    text = text_of(matrix)
    for part in (1, 2, 3, 4, 5):
        numeric = [cell for cell in table_cells(section(text, part)) if re.search(r"\d", cell) and "layers" not in cell and "KLD" not in cell]
        assert numeric == []
    for status in ended.values():
        assert f"*{status}*" in section(text, 2)


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.tuples(st.sampled_from(["reference", "fine", "coarse"]), st.sampled_from([3, 6])), st.floats(0.001, 0.9)))
def test_no_number_without_a_record(experiment: Experiment, values: dict[tuple[str, int], float]) -> None:
    """Every figure in the tables of results is a measured value of that very path and depth, written as the lab writes it."""
    matrix = build_matrix(experiment, [complete(cell(path, layers), kld) for (path, layers), kld in values.items()], compose)
    text = section(text_of(matrix), 2)
    for depth in (3, 6):
        lines = [line for line in text.split(f"### {depth} layers")[1].split("###")[0].splitlines() if line.startswith("|")]
        rows = {row.cell.path.name: row for row in matrix.rows if row.cell.layers == depth}
        assert len(lines) == (2 + sum(layers == depth for _, layers in values) if any(layers == depth for _, layers in values) else 0)
        for line in lines[2:]:
            path, reference, *figures = (part.strip() for part in line.strip("|").split("|"))
            assert figures == [with_error(matrix.entry(rows[path], name)) for name in ("ppl", "kld_mean", "pp512_tok_s")]
            assert re.fullmatch(r"R\d+", reference)


def test_every_record_number_leads_to_a_file(experiment: Experiment) -> None:
    matrix = build_matrix(experiment, ladder({"reference": 0.0, "fine": 0.1}), compose)
    text = text_of(matrix)
    quoted = set(re.findall(r"\bR\d+\b", section(text, 1) + section(text, 2)))
    listed = dict(re.findall(r"^\| (R\d+) +\|.*?(runs/\S+?/record\.json)", section(text, 12), re.MULTILINE))
    assert quoted == set(listed) == {"R1", "R2"}
    assert set(listed.values()) == {row.record_path for row in matrix.rows if row.current}


def test_records_of_two_machines_are_said_to_be_mixed_and_not_compared(experiment: Experiment) -> None:
    other = {**PROVENANCE, "machine": {"cpu": "Other CPU", "cores": 64}, "code_sha256": "beef" * 16}
    records = [complete(cell("reference", 6), 0.0), complete(cell("fine", 6), 0.1, speed=500.0, provenance=other)]
    text = text_of(build_matrix(experiment, records, compose))
    banner = text.split("## 1.")[0]
    assert "**Mixed records:** they differ in machine" in banner and "Other CPU, 64 cores (1)" in banner and "beefbeefbeef" in banner
    assert "not compared: machine.cpu, machine.cores differ" in section(text, 4) and "faster" not in re.sub(r'"Faster".*', "", section(text, 4))


def test_uniform_records_are_not_called_mixed(experiment: Experiment) -> None:
    text = text_of(build_matrix(experiment, ladder({"reference": 0.0, "fine": 0.1}), compose))
    assert "Mixed records" not in text and "**torch**: 2.9.0" in text and experiment.sha256 in text


def test_free_text_cannot_break_a_table_or_inject_markup(experiment: Experiment) -> None:
    reason = "a | b\nc <b>*d*</b> ~e~ _f_ [g](http://h)"
    gap = Gap(status=Status.CRASHED, reason=reason, fill="python -m lab run 'a|b'")
    text = text_of(build_matrix(experiment, [record(cell(), gaps={"ppl": gap})], compose))
    assert r"a \| b c &lt;b>\*d\*&lt;/b> \~e\~ \_f\_ [g]\(http://h)" in text and "`python -m lab run 'a|b'`" in text
    assert escape("x\ny <= 3") == "x y <= 3" and escape("see `a*b|c`") == r"see `a*b\|c`" and code("a `b` c") == "`` a `b` c ``"


def test_columns_line_up_also_under_chinese_and_wide_tables_are_left_alone() -> None:
    text = table(Table("", ["路径", "n"], [["a", "1"], ["中文字", "22"]]))
    assert {width(line) for line in text.splitlines()} == {16}
    wide = table(Table("", ["a", "b"], [["x" * 200, "y"]]))
    assert wide.splitlines()[1] == "| :-- | --: |" and max(map(len, wide.splitlines())) == len(wide.splitlines()[2])


def test_no_line_of_a_table_in_the_stages_is_wider_than_200_columns() -> None:
    for name in ("flash_next_r9700", "kestrel_8b"):
        assert max(width(line) for line in stage_text(name).splitlines() if line.startswith("|")) <= 200


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        ("ppl", 23.4567, "23.46"),
        ("kld_mean", 0.0, "0"),
        ("kld_mean", 0.0000123, "1.23e-05"),
        ("pp512_tok_s", 1234.5, "1234"),
        ("resident_bytes", 12_345_678.0, "12.3"),
        ("top1_agreement", 0.98765, "98.77"),
        ("expert_cosine", 0.999994, "0.99999"),
    ],
)
def test_numbers_have_sensible_digits(metric: str, value: float, text: str) -> None:
    assert number(metric, value) == text


def test_significant_digits_keep_the_sign_and_size() -> None:
    assert [significant(v) for v in (-0.5, 9.996, 123456.0, 1e9)] == ["-0.500", "10.00", "123456", "1.00e+09"]


def test_an_unreadable_record_is_a_finding(experiment: Experiment) -> None:
    spoilt = Unreadable("elsewhere", "runs/elsewhere/001/record.json", "record: cut off")
    text = text_of(build_matrix(experiment, [], compose, [spoilt]))
    assert "`runs/elsewhere/001/record.json`: record: cut off" in section(text, 9) and "1 record files could not be read" in section(text, 12)


def test_the_sections_come_in_the_order_of_the_posts(tmp_path: Path) -> None:
    for language in ("en", "zh"):
        text = text_of(build_matrix(small(tmp_path), [], compose), language)
        assert [int(found) for found in re.findall(r"^## (\d+)\. \S", text, re.MULTILINE)] == list(range(1, 13))
