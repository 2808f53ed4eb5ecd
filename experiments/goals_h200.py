"""The goals of the H200 stage and what was reached: `python -m experiments.goals_h200` writes reports/goals_h200.md and goals_h200.zh.md.

Why a script: every figure comes from the exported records of experiment flash_next_h200 or from the result files of the kernel benches, and none is typed in.
A goal without a result reads as not measured, with the status that stands in its place. It reads what is in `experiments/flash_next_h200/` and measures
nothing; what a record or a bench cannot prove, this table cannot either.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from lab.compose import compose_cells
from lab.errors import LabError, flat
from lab.experiment import load_experiment
from lab.likeness import unlike
from lab.matrix import Entry, Matrix, build_matrix
from lab.parcels import read_parcels
from lab.project import Project, find_project
from lab.record import Measurement
from lab.registered import Overrides, pick
from lab.report.markup import Table, escape, table
from lab.report.numbers import significant
from lab.store import write_atomic

EXPERIMENT = "flash_next_h200"
READ_BYTES_S = 4.4e12
FLOPS_S = 790e12
"""The bounds that the goals were set against: a read-only sum over 4 GiB and large bf16 products, one H200, 2026-11-29."""
HUMMING = {"q2_levels": "2 bit q2_levels", "q2_g32": "2 bit q2_g32", "w3_levels": "3 bit w3_levels", "Q4_0": "4 bit Q4_0"}
FEW = {1: 1.5, 4: 1.2, 8: 1.0}
"""Least times humming's speed by tokens; at 512 and 4096 tokens MANY."""
MANY = 0.9
Words = dict[str, str]
WORDS: dict[str, Words] = {
    "en": {
        "title": "Goals of the H200 stage",
        "intro": "Written by `python -m experiments.goals_h200` from the exported records of `{experiment}` and the result files beside them.",
        "bounds": "Shares are of the bounds that the goals were set with, 4.4 TB/s and 790 TFLOP/s; the stage report takes those measured beside each run.",
        "goal": "Goal",
        "asked": "Asked",
        "reached": "Reached",
        "word": "Verdict",
        "script": "By",
        "met": "met",
        "missed": "missed",
        "open": "not decided",
        "none": "not measured",
        "apart": "not comparable: {what}",
        "no_detail": "the record does not say what its share is of",
        "no_file": "no result file {file}",
        "no_row": "the result file has no such row",
        "tg": "TG, 48 layers, one sequence, expert_q2, of the byte roofline at 4.4 TB/s",
        "agg": "TG of four together, same, of its roofline",
        "ways": "TG of four together over one sequence",
        "pp": "PP4096, 48 layers, expert_q2, of 790 TFLOP/s in bf16",
        "hf_tg": "TG against transformers, 6 layers, bf16",
        "hf_pp": "PP512 against transformers, 6 layers, bf16",
        "tiered": "TG of tiered with 256 of 512 experts, 48 layers, of the bound set by its measured misses and the bus",
        "humming": "experts, {codec}, {what}, M = {tokens}, against humming-kernels 0.1.20",
        "trunk": "int8 trunk 10240 x 2560, M = 1, against cuBLAS bf16",
        "both products": "whole layer against its two products alone",
        "with SiLU and sum": "whole layer against its products with SiLU and sum",
        "sum": "{met} met, {missed} missed, {open} not decided, {none} not measured, of {all}.",
    },
    "zh": {
        "title": "H200 阶段的目标",
        "intro": "由 `python -m experiments.goals_h200` 根据 `{experiment}` 的导出记录及其旁的结果文件生成。",
        "bounds": "占比以设定目标时的上界 4.4 TB/s 与 790 TFLOP/s 为准；阶段报告则取每次运行时该机器实测的上界。",
        "goal": "目标",
        "asked": "要求",
        "reached": "达到",
        "word": "判定",
        "script": "脚本",
        "met": "达标",
        "missed": "未达",
        "open": "未判定",
        "none": "未实测",
        "apart": "不可比：{what}",
        "no_detail": "记录未说明占比的基数",
        "no_file": "没有结果文件 {file}",
        "no_row": "结果文件中没有该行",
        "tg": "TG，48 层，单路，expert_q2，占 4.4 TB/s 字节屋顶线",
        "agg": "四路合计 TG，同上，占其屋顶线",
        "ways": "四路合计 TG 与单路之比",
        "pp": "PP4096，48 层，expert_q2，占 bf16 的 790 TFLOP/s",
        "hf_tg": "TG 与 transformers 之比，6 层，bf16",
        "hf_pp": "PP512 与 transformers 之比，6 层，bf16",
        "tiered": "tiered 的 TG，512 专家中 256 个驻留，48 层，占实测未命中与总线所定上界",
        "humming": "专家，{codec}，{what}，M = {tokens}，与 humming-kernels 0.1.20 之比",
        "trunk": "int8 主干 10240 x 2560，M = 1，与 cuBLAS bf16 之比",
        "both products": "整层对其仅两个乘积",
        "with SiLU and sum": "整层对其乘积加 SiLU 与求和",
        "sum": "共 {all} 项：达标 {met}，未达 {missed}，未判定 {open}，未实测 {none}。",
    },
}
CELL = f"`python -m lab run experiment={EXPERIMENT}`"
BENCH = "`python -m experiments.humming_bench`"


@dataclass(frozen=True)
class Line:
    """One goal: its words, the least value asked for, what was reached (None: why not), and how that is printed (`%` or `x`).

    `apart`: what keeps its two numbers from being compared, as the stage report has it; such a goal is neither met nor missed.
    """

    goal: str
    asked: float
    value: float | None
    unit: str
    script: str
    remark: str = ""
    apart: str = ""

    @property
    def word(self) -> str:
        """met, missed, open or none."""
        if self.value is None:
            return "none"
        if self.apart:
            return "open"
        return "met" if self.value >= self.asked else "missed"


def main(words: Sequence[str] | None = None) -> int:
    """Writes both files. Exit code 2, and nothing written, for a file of records or of results that is not sound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help=f"records.jsonl.gz and humming.json (default: experiments/{EXPERIMENT})")
    parser.add_argument("--out", type=Path, help="default: reports")
    given = parser.parse_args(words)
    project = find_project()
    folder = given.folder or project.root / "experiments" / EXPERIMENT
    try:
        for option, asked in (("--folder", given.folder), ("--out", given.out)):
            if asked is not None and not asked.is_dir():
                raise LabError(f"{option} {asked}: no such folder")
        texts = {code: text_of(project, folder, code) for code in WORDS}
        for code, text in texts.items():
            target = (given.out or project.root / "reports") / ("goals_h200.md" if code == "en" else f"goals_h200.{code}.md")
            _write(target, text)
            print(project.short(target))
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _write(target: Path, text: str) -> None:
    """Raises LabError where the file cannot be written."""
    try:
        write_atomic(target, text)
    except OSError as error:
        raise LabError(f"{target}: not written: {error.strerror}") from None


def text_of(project: Project, folder: Path, code: str) -> str:
    """The whole file in one language."""
    told = WORDS[code]
    lines = [*_of_records(_matrix(project, folder / "records.jsonl.gz"), told), *_of_benches(folder / "humming.json", told)]
    counts = {word: sum(line.word == word for line in lines) for word in ("met", "missed", "open", "none")}
    rows = [[escape(line.goal), f">= {_printed(line.asked, line.unit)}", _reached(line), told[line.word], line.script] for line in lines]
    shown = table(Table("", [told[name] for name in ("goal", "asked", "reached", "word", "script")], rows, words=5))
    intro = told["intro"].format(experiment=EXPERIMENT)
    return f"# {told['title']}\n\n{intro} {told['bounds']}\n{told['sum'].format(all=len(lines), **counts)}\n\n{shown}\n"


def _printed(value: float, unit: str) -> str:
    return f"{significant(value)} {unit}"


def _reached(line: Line) -> str:
    if line.value is None:
        return escape(line.remark)
    remarks = "; ".join(remark for remark in (line.remark, line.apart) if remark)
    # With as many digits as show on which side of the goal it lies.
    digits = next((n for n in range(3, 9) if (float(significant(line.value, n)) >= line.asked) is (line.value >= line.asked)), 9)
    return f"{significant(line.value, digits)} {line.unit}" + (f" ({escape(remarks)})" if remarks else "")


def _matrix(project: Project, file: Path) -> Matrix:
    """The experiment set against the exported records; against none where there is no such file."""
    parcels = read_parcels(file) if file.exists() else []
    marks = {(parcel.record.cell_id, parcel.record.attempt): parcel.marks for parcel in parcels if parcel.marks}
    experiment = load_experiment(EXPERIMENT, project.root / "experiments")
    return build_matrix(experiment, [parcel.record for parcel in parcels], lambda words: compose_cells(words, project)[0], marks=marks)


def _entry(matrix: Matrix, where: Overrides, metric: str) -> Entry:
    found = pick([row.point for row in matrix.rows], where)
    assert found is not None, f"{where} is no cell of {EXPERIMENT}"
    return matrix.entry(matrix.rows[found], metric)


def _of_records(matrix: Matrix, told: Words) -> Iterator[Line]:
    whole: Overrides = {"path": "expert_q2", "layers": 48}
    tier: Overrides = {"path": "tiered", "layers": 48, "placement.slots": 256}
    own: Overrides = {"path": "reference", "layers": 6}
    theirs: Overrides = {**own, "engine": "transformers"}

    def of_bytes(found: Measurement) -> float | None:
        lanes, nbytes = (_number(found, name) for name in ("lanes", "bytes_per_step"))
        return None if lanes is None or nbytes is None else 100 * found.value / lanes * nbytes / READ_BYTES_S

    def of_flops(found: Measurement) -> float | None:
        flops = _number(found, "flops_per_token")
        return None if flops is None else 100 * found.value * flops / FLOPS_S

    yield _share(told, told["tg"], 60, _entry(matrix, whole, "tg128_tok_s"), of_bytes)
    yield _share(told, told["agg"], 55, _entry(matrix, whole, "agg4_tg128_tok_s"), of_bytes)
    yield _ratio(told, told["ways"], 2.2, _entry(matrix, whole, "agg4_tg128_tok_s"), _entry(matrix, whole, "tg128_tok_s"))
    yield _share(told, told["pp"], 40, _entry(matrix, whole, "pp4096_tok_s"), of_flops)
    for name, metric, asked in (("hf_tg", "tg128_tok_s", 15), ("hf_pp", "pp512_tok_s", 10)):
        yield _ratio(told, told[name], asked, _entry(matrix, own, metric), _entry(matrix, theirs, metric))
    yield _share(told, told["tiered"], 80, _entry(matrix, tier, "tg128_tok_s"), lambda found: found.roofline_pct)


def _number(found: Measurement, detail: str) -> float | None:
    """A detail that is a positive number, or None: records come from elsewhere, too."""
    value = found.details.get(detail)
    return float(value) if isinstance(value, int | float) and 0 < value < math.inf else None


def _why(entry: Entry) -> str:
    return str(entry.gap.status) if entry.gap else ""


def _share(told: Words, goal: str, asked: float, entry: Entry, of: Callable[[Measurement], float | None]) -> Line:
    found = entry.measurement
    value = None if found is None else of(found)
    remark = _why(entry) if found is None else told["no_detail"] if value is None else f"{significant(found.value, 4)} tok/s"
    return Line(goal, asked, value, "%", CELL, remark)


def _ratio(told: Words, goal: str, asked: float, entry: Entry, base: Entry) -> Line:
    found, other, record, against = entry.measurement, base.measurement, entry.row.current, base.row.current
    if found is None or other is None or record is None or against is None:
        return Line(goal, asked, None, "x", CELL, _why(entry) or _why(base))
    reasons = unlike(record, against, entry.metric) if entry.metric == base.metric else []
    apart = told["apart"].format(what=", ".join(reason.brief for reason in reasons)) if reasons else ""
    return Line(goal, asked, found.value / other.value, "x", CELL, f"{significant(found.value, 4)} / {significant(other.value, 4)} tok/s", apart)


class BenchRow(BaseModel):
    """A row of experiments.humming_bench: microseconds, and `ratio` to the lab's row (1 in the lab's own)."""

    name: str
    what: str
    tokens: int
    us: float = Field(gt=0, allow_inf_nan=False)
    ratio: float = Field(allow_inf_nan=False)


class BenchFile(BaseModel):
    """Its file of results."""

    rows: list[BenchRow]


def _bench_rows(file: Path) -> list[BenchRow]:
    """Empty where there is no such file. Raises LabError for one that is not as the bench writes it."""
    if not file.exists():
        return []
    try:
        return BenchFile.model_validate_json(file.read_bytes()).rows
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise LabError(f"{file.name}: {f'{where}: ' if where else ''}{flat(first['msg'])}; write it again with python -m experiments.humming_bench") from None
    except OSError as error:
        raise LabError(f"{file.name}: not readable: {error.strerror}") from None


def _of_benches(file: Path, told: Words) -> Iterator[Line]:
    rows = _bench_rows(file)
    missing = told["no_row"] if rows else told["no_file"].format(file=file.name)

    def line(goal: str, asked: float, what: str, tokens: int, ours: str, theirs: str) -> Line:
        """`theirs` over the lab's row just before it: of a codec that several rows share, the one that it was timed with."""
        mine: BenchRow | None = None
        for row in rows:
            if (row.what, row.tokens) != (what, tokens):
                continue
            if row.ratio == 1.0:
                mine = row
            elif mine is not None and mine.name.split(",")[0] == ours and row.name.startswith(theirs):
                return Line(goal, asked, row.us / mine.us, "x", BENCH, f"{significant(mine.us)} / {significant(row.us)} us")
        return Line(goal, asked, None, "x", BENCH, missing)

    for codec, shown in HUMMING.items():
        bits = shown[0]
        for tokens, asked in FEW.items():
            for what in ("gate+up", "down"):
                yield line(told["humming"].format(codec=shown, what=what, tokens=tokens), asked, what, tokens, codec, f"humming int{bits}")
        for tokens in (512, 4096):  # the lab's row is the whole layer, humming's two products leave parts of it out
            for name in ("both products", "with SiLU and sum"):
                yield line(told["humming"].format(codec=shown, what=told[name], tokens=tokens), MANY, "both", tokens, codec, f"humming int{bits}, {name}")
    yield line(told["trunk"], 1.7, "trunk 10240x2560", 1, "int8_g128", "cuBLAS bf16")


if __name__ == "__main__":
    sys.exit(main())
