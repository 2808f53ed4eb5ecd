"""What the sizes say: bounds reach claims and charts, accounts are told with their derivation, and a cell without sizes has a reason."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import lab.capacity
from lab.capacity import DerivedTerm, Ledger, NoLedger
from lab.capacity.ledger import Line, Reads, Workspace
from lab.convert import convert_command
from lab.matrix import Matrix, build_matrix
from lab.project import Project
from lab.registered import Account
from lab.report.capacity import NO_CAPACITY, Capacity, account_tables, capacity_table, load_capacity
from lab.report.cli import load_matrix
from tests.matrix_helpers import compose, small
from tests.report.support import EN, EXPERIMENTS, ZH, project_with, section, stage, text_of

TERMS = [
    DerivedTerm({"en": "experts", "zh": "专家"}, False, 31.7, "GiB", 31.64 * 2**30, "close", -0.06, "experts", 2.25, 2.25),
    DerivedTerm("table", False, 39.5, "GiB", 43.95 * 2**30, "not derivable", 4.45, "experts", 3.125, 2.81),
    DerivedTerm("rest", False, 8, "GB", 8.03e9, "derived", 0.03, "trunk", 16, 15.9),
    DerivedTerm("unnamed", False, 1, "GiB", None, "not derivable"),
    DerivedTerm("total", True, 88.6, "GiB", 88.36 * 2**30, "close", -0.24),
]


def ledger(device_bytes: int, tg: float | None = None) -> Ledger:
    return Ledger(
        model="nano", path="fine", device="cpu", layers=3, one_memory=False, state_bytes=0, state_basis="none",
        lines=(Line(component="experts", codec="bf16", placement="device", where="device", weights=device_bytes // 2, bytes=device_bytes),),
        workspace=Workspace(device_bytes=0, host_bytes=0, basis="none"),
        decode_bytes_per_token=Reads(device_bytes=1.0, bus_bytes=0.0, host_bytes=0.0), flops_per_token=1.0, tg_bound_tok_s=tg, basis="bytes over bandwidth",
    )  # fmt: skip


@pytest.fixture
def matrix(tmp_path: Path) -> Matrix:
    return build_matrix(small(tmp_path), [], compose)


def test_a_cell_has_its_ledger_or_a_reason(matrix: Matrix) -> None:
    first, second, third, *_ = matrix.rows
    capacity = Capacity(
        ledgers={first.key: ledger(3_100_000_000, 205.7), second.key: ledger(2_000_000)},
        absent={third.key: "no sizes | here"},
        fits={first.key: False, second.key: None},
    )
    found = capacity_table(matrix, capacity, EN)
    assert found.header == ["Path", "Layers", "On the device, GB", "On the host, GB", "Fits the device", "TG bound, tok/s"]
    assert found.rows == [["reference", "3", "3.10", "0", "no", "206"], ["reference", "6", "0.00200", "0", "open", "–"]]
    assert found.notes == ["Bounds: bytes over bandwidth.", r"no sizes \| here: fine, 3 layers"]
    assert capacity.bound(first, "tg") == (205.7, "bytes over bandwidth") and capacity.bound(first, "ppl") == (None, "")
    assert capacity_table(matrix, NO_CAPACITY, EN).rows == []


def test_types_that_only_an_absent_file_knows_are_named_as_assumed(tmp_path: Path) -> None:
    """The bound of an 8-bit file that is not at hand is counted with the path's assumption of 4 bits: a reader must see that."""
    project = project_with([], tmp_path)
    matrix = load_matrix(project, "kestrel_small")
    (file,) = {row.cell.model.artifact for row in matrix.rows if row.cell.model.artifact.endswith("q8.vqf")}

    def assumed() -> set[str]:
        capacity = load_capacity(project, matrix)
        (note,) = [note for note in capacity_table(matrix, capacity, EN).notes if "(trunk: vqf:Q4_0, head: vqf:Q8_0)" in note]
        return {row.cell.model.artifact for row in matrix.rows if capacity.ledgers[row.key].assumed and row.cell.model.artifact in note}

    absent = assumed()
    (project.root / file).parent.mkdir(parents=True)
    convert_command([str(EXPERIMENTS / "qwen3_small"), str(project.root / file), "--to", "vqf", "--wmode", "q8"])
    assert file in absent and assumed() == absent - {file}


@pytest.mark.parametrize(
    ("lang", "needs"), [(EN, "experts would have to take 2.81 bits per weight instead of 3.125"), (ZH, "experts 须为每权重 2.81 bit，而非 3.125")]
)
def test_an_account_is_told_term_by_term(lang: Any, needs: str) -> None:
    account = stage("flash_next_r9700").experiment.accounts[0]
    rows = account_tables(Capacity(accounts=((account, TERMS),)), lang)[0].table.rows
    assert rows[0][:3] == ["experts" if lang is EN else "专家", "31.7", "31.64"] and rows[0][3] == lang("capacity.close")
    assert rows[1][3] == f"{lang('capacity.not_derivable')}{lang('clause_separator')}{needs}"
    assert rows[2][1:] == ["8", "8.03", lang("capacity.derived")], "in the account's unit"
    assert rows[3][2:] == ["–", lang("capacity.not_derivable")] and rows[4][0] == f"**{lang('claims.account_total')}**"


def test_the_report_shows_accounts_with_budget_and_remark() -> None:
    matrix = stage("flash_next_r9700")
    account = matrix.experiment.accounts[0]
    text = section(text_of(matrix, "en", Capacity(accounts=((account, TERMS),))), 8)
    assert "31.7 + 48.9 + 8 = 88.6 < 104" in text and "Budget it was set against: 104 GiB." in text and "the reading that comes closest" in text


def test_everything_is_asked_of_lab_capacity(matrix: Matrix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "config.json").write_text('{"text_config": {"vocab_size": 2560}}')
    answers = {row.key: ledger(4_000_000_000) if row.cell.layers == 3 else NoLedger(reason="no geometry") for row in matrix.rows}
    account = cast(Account, SimpleNamespace(id="a"))
    experiment = cast(Any, SimpleNamespace(accounts=(account,)))
    monkeypatch.setattr(lab.capacity, "ledgers", lambda project, cells: answers)
    monkeypatch.setattr(lab.capacity, "derive", lambda project, asked: TERMS if asked is account else [])
    monkeypatch.setattr(lab.capacity, "judge", lambda ledger, device, host: SimpleNamespace(fits=True))
    found = load_capacity(Project(root=tmp_path, runs=tmp_path), cast(Any, SimpleNamespace(rows=matrix.rows, experiment=experiment)))
    shallow = {row.key for row in matrix.rows if row.cell.layers == 3}
    assert set(found.ledgers) == set(found.fits) == shallow and set(found.absent.values()) == {"no geometry"}
    assert found.accounts == ((account, TERMS),) and found.vocabulary(matrix.rows[0].cell) == 2560
