"""What fills a gap, in the report and at the end of a run: the right command once, and none where none can.

Also what a reader asked of the reports beside: flips told prompt by prompt, counts printed whole, sections under their chapters, claims about another setup.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lab.compose import compose_cells
from lab.console import print_result
from lab.matrix import Matrix, build_matrix
from lab.project import Project
from lab.record import Gap, Record, Status
from lab.report.fillers import asked, filler, gap_word
from lab.report.numbers import as_registered, number, with_unit
from lab.report.provenance import origin
from tests.matrix_helpers import cell, compose, measured, record, small
from tests.report.support import EN, ZH, first_gpu_records, named_section, stage, stage_text, table_rows, text_of

OTHER = "python -m lab run path=fine model=nano device=cpu layers=3"
RUN = "python -m lab run model=nano path=fine layers=3 device=cpu"
CONVERT = "python -m lab convert models/a.vqf OUT --to vqf --layout 0x3"


def gap(status: Status, reason: str, fill: str = RUN) -> Gap:
    return Gap(status=status, reason=reason, fill=fill)


@pytest.fixture(scope="module")
def kestrel() -> Matrix:
    return stage("kestrel_small", first_gpu_records())


@pytest.mark.parametrize(
    ("given", "run", "command"),
    [
        (gap(Status.NOT_RUN, "never attempted"), "", RUN),
        (gap(Status.UNSUPPORTED, "device=h200 is not here"), "", RUN),
        (gap(Status.UNSUPPORTED, "not applicable: it is the other side"), "", ""),
        (gap(Status.ARTIFACT_REFUSED, f"layout flags 0x1; nothing relaxes this check, convert the file: {CONVERT}"), "", CONVERT),
        (gap(Status.ARTIFACT_REFUSED, "the header's checksum is wrong"), "", ""),
        (
            gap(Status.CRASHED, "killed"),
            "python -m lab run path=fine model=nano device=cpu layers=3",
            "python -m lab run path=fine model=nano device=cpu layers=3",
        ),
        (gap(Status.CRASHED, "killed", f"{RUN} force=true"), RUN, f"{RUN} force=true"),
        (gap(Status.CRASHED, "killed", "it's not a command"), RUN, "it's not a command"),
    ],
)
def test_a_command_stands_where_one_helps_and_in_one_spelling(given: Gap, run: str, command: str) -> None:
    assert filler(given, run) == command


def test_a_gap_that_is_not_asked_for_has_a_word_of_its_own() -> None:
    owed, free = gap(Status.UNSUPPORTED, "no code for it"), gap(Status.UNSUPPORTED, "not applicable: no sense")
    assert (asked(owed), gap_word(owed), asked(free), gap_word(free)) == (True, "UNSUPPORTED", False, "N/A")
    assert asked(gap(Status.OOM, "not applicable"))


@pytest.mark.parametrize(("language", "first"), [("en", "**First:** as they stand"), ("zh", "**先决条件：**")])
def test_a_stage_tells_what_its_commands_need_and_offers_none_for_what_is_not_asked(language: str, first: str) -> None:
    part = named_section(stage_text("kestrel_8b", language), stage("kestrel_8b"), language, "gaps")
    groups = dict(re.findall(r"^#### (NOT_RUN|N/A)[ （(]+\d+[)）]\n(.*?)(?=^#### |\Z)", part, re.MULTILINE | re.DOTALL))
    assert part.count("`python -m lab run model=") == groups["NOT_RUN"].count("`python -m lab run model=") == 4
    assert first not in part and groups["NOT_RUN"].count(" artifact=models/qwen3_8b/qwen3_8b-q4.vqf") == 4
    others = named_section(stage_text("flash_next_r9700", language), stage("flash_next_r9700"), language, "gaps")
    assert first in others and "artifact=FILE.gguf" in others
    assert (EN if language == "en" else ZH)("gaps.not_asked") in groups["N/A"] and "UNSUPPORTED (" not in part
    assert (EN if language == "en" else ZH).gloss(Status.UNSUPPORTED) not in part


def test_one_cell_that_crashed_stands_once_with_one_command(kestrel: Matrix) -> None:
    part = named_section(text_of(kestrel), kestrel, "en", "gaps").split("#### CRASHED (16)")[1].split("\n####")[0]
    (line,) = (line for line in part.splitlines() if line.startswith("- "))
    assert "(all 16 metrics): `python -m lab run model=qwen3_small path=kestrel_vqf layers=6 bench=standard device=h200 artifact=" in line


def shown(of: Record) -> str:
    """What `lab run` prints at its end."""
    out = io.StringIO()
    print_result(Project(root=Path("root"), runs=Path("root/runs")), cast(Any, SimpleNamespace(record=of, file=None, mirrored=None)), out)
    return out.getvalue()


def test_the_end_of_a_run_offers_no_command_for_what_none_fills() -> None:
    free = {
        "expert_cosine": gap(Status.UNSUPPORTED, "not applicable: nothing encoded"),
        "greedy_match_tokens": gap(Status.UNSUPPORTED, "not applicable: CPU"),
    }
    good = record(cell("fine"), {"ppl": measured("ppl", 20.0)}, gaps=free)
    assert "to fill the gaps" not in shown(good) and "not applicable: nothing encoded" in shown(good) and shown(good).count("N/A  ") == 2
    twice = record(cell("fine"), {"ppl": measured("ppl", 20.0)}, gaps=dict.fromkeys(("kld_mean", "kld_p99", "top1_agreement"), gap(Status.OOM, "full up")))
    assert shown(twice).count("OOM: full up") == 1 and shown(twice).count("as above") == 2
    owed = record(cell("fine"), {"ppl": measured("ppl", 20.0)}, gaps={**free, "kld_mean": gap(Status.OOM, "full"), "kld_p99": gap(Status.OOM, "full")})
    assert shown(owed).count("to fill the gaps:") == 1 and f"to fill the gaps: {RUN}\n" in shown(owed)
    refused = record(cell("fine"), status=Status.ARTIFACT_REFUSED, gaps={"ppl": gap(Status.ARTIFACT_REFUSED, f"flags differ: {CONVERT}")})
    assert f"to fill the gaps: {CONVERT}\n" in shown(refused) and RUN not in shown(refused)
    for words, offered in ((("path=tiered", "device=cpu"), False), (("path=expert_q2", "device=h200"), True)):
        (cell_given,) = compose_cells(["model=nano", "layers=3", *words])
        stopped = record(cell_given, status=Status.UNSUPPORTED, gaps={"ppl": gap(Status.UNSUPPORTED, "as the cell is, or where it is")})
        assert ("to fill the gaps" in shown(stopped)) == offered != ("no command fills these gaps as the cell stands" in shown(stopped))


@pytest.mark.parametrize(("lang", "at", "taken"), [(EN, "first flip at", "True"), (ZH, "首个翻转位置", "是")])
def test_first_flips_are_told_prompt_by_prompt(kestrel: Matrix, lang: Any, at: str, taken: str) -> None:
    part = named_section(text_of(kestrel, lang.code), kestrel, lang.code, "measured")
    rows = table_rows(part.split("##### `greedy_match_tokens`")[1].split("\n##### ")[0])
    place = rows[0].index(at)
    assert [row[place] for row in rows[2:]] == ["67", "8", "52", "6"] and all(row[-1] == taken for row in rows[2:])
    assert rows[-1][place + 1 : place + 5] == ["607", "450", "0.02897", "0"]
    assert f"**prompts**{lang('colon')}{lang('measured.listed_with', metric='`greedy_match_tokens`')}" in part


def test_counts_are_whole_numbers(kestrel: Matrix) -> None:
    assert number("greedy_match_tokens", 6.0) == "6" and number("greedy_match_tokens", 6.25) == "6.25"
    assert with_unit("greedy_match_tokens", 6.0, EN) == "6 tokens" and as_registered("greedy_match_tokens", 16.0, ZH) == "16 token"
    assert "**FAILS**: 6 tokens is not >= 16 tokens" in text_of(kestrel) and "**不成立**：6 token 不满足 >= 16 token" in text_of(kestrel, "zh")


def test_sections_of_a_chapter_stand_below_it_and_their_parts_below_them(kestrel: Matrix) -> None:
    levels = {line.lstrip("# ").split(" ")[0]: len(line) - len(line.lstrip("#")) for line in text_of(kestrel).splitlines() if re.match(r"#+ [\d.]+ ", line)}
    assert {number: level for number, level in levels.items() if number[0] in "34"} == {
        "3.": 2,
        "3.1": 3,
        "3.2": 3,
        "4.": 2,
        "4.1": 3,
        "4.2": 3,
        "4.3": 3,
        "4.4": 3,
    }
    assert "\n#### 6 layers\n" in text_of(kestrel) and "\n### 6 layers\n" not in text_of(kestrel) and "Set by" not in text_of(kestrel)


@pytest.mark.parametrize(("language", "words"), [("en", ("about another setup", "no metric for it here")), ("zh", ("属另一套配置", "此处无对应指标"))])
def test_a_claim_about_another_setup_is_not_said_to_lack_a_cell(language: str, words: tuple[str, str]) -> None:
    lang = EN if language == "en" else ZH
    for name, told in (("flash_next_h200", words[:1]), ("kestrel_8b", words)):
        matrix = stage(name)
        part = named_section(stage_text(name, language), matrix, language, "claims")
        assert all(word in part for word in told) and lang("claims.no_cell") not in part
    part = named_section(stage_text("flash_next_h200", language), stage("flash_next_h200"), language, "claims")
    elsewhere = [claim for claim in stage("flash_next_h200").experiment.claims if not claim.where]
    assert part.count(words[0]) == len(elsewhere) > 5


def test_what_differs_between_records_is_named_in_the_language(kestrel: Matrix, tmp_path: Path) -> None:
    banner = text_of(kestrel, "zh").split("\n## ")[0]
    for word in ("机器", "设备", "torch 版本", "代码", "产物"):
        assert f"各记录的{word}不同" in banner
    assert "cores" not in banner and "16 核" in banner
    assert "(not recorded)" not in text_of(kestrel, "zh") and "（未记录）" in text_of(kestrel, "zh") and " items)" not in text_of(kestrel, "zh")
    matrix = build_matrix(small(tmp_path), [record(cell("fine"), provenance={})], compose)
    assert {fact.text for fact in origin([row.current for row in matrix.rows if row.current], ZH)} >= {"（未记录）"}


def test_reasons_that_an_experiment_words_in_both_languages_are_told_in_the_reports_own() -> None:
    matrix = stage("flash_next_r9700")
    part = named_section(stage_text("flash_next_r9700", "zh"), matrix, "zh", "gaps").replace("\\", "")
    for end in matrix.experiment.dead_ends:
        if end.where:
            assert " ".join(ZH.text(end.evidence).split()) in part and EN.text(end.evidence) not in part
    english = named_section(stage_text("flash_next_r9700"), matrix, "en", "gaps").replace("\\", "")
    closed = {entry.gap.reason for entry in matrix.entries.values() if entry.gap and entry.gap.status is Status.DEAD_END}
    assert closed and all(" ".join(reason.split()) in english for reason in closed)


def test_what_some_commands_need_is_said_of_those_cells() -> None:
    part = named_section(stage_text("flash_next_r9700"), stage("flash_next_r9700"), "en", "gaps")
    (line,) = (line for line in part.splitlines() if "was not told how much" in line)
    assert "the commands of tiered, 3 layers; tiered, 6 layers; tiered, 24 layers; tiered, 48 layers end" in line.replace("*", "")
