"""How ledgers are asked: from another process, kept, made again when something changed; and the parent stays without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lab.capacity import Ledger, NoLedger, ledgers, service
from lab.cell import Cell
from lab.compose import compose_cells
from lab.errors import LabError
from lab.project import Project
from tests.capacity.helpers import in_process
from tests.runner_helpers import make_project, python_path

__all__ = ["in_process"]
WORDS = ("model=flash_next", "path=expert_q2", "layers=3", "device=r9700")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path / "p")


def composed(project: Project, *words: str) -> Cell:
    given = dict(word.split("=", 1) for word in (*WORDS, *words))
    return compose_cells([f"{key}={value}" for key, value in given.items()], project)[0]


def test_the_parent_does_not_import_torch_or_mlflow() -> None:
    check = "import sys, lab.capacity, lab.capacity.plan, lab.plan_view; sys.exit(1 if {'torch', 'mlflow'} & set(sys.modules) else 0)"
    assert subprocess.run([sys.executable, "-c", check], env={"PYTHONPATH": python_path()}, check=False).returncode == 0


def test_the_real_process_answers_and_its_answer_is_kept(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [composed(project), composed(project, "path.components.experts.codec=w3_levels"), composed(project, "path=kestrel_vqf")]
    first = ledgers(project, cells)
    assert [type(first[c.hash]) for c in cells] == [Ledger, Ledger, NoLedger]

    def never(*_: object) -> None:
        raise AssertionError("asked again")

    monkeypatch.setattr(service, "_ask", never)
    assert ledgers(project, cells) == first


@pytest.mark.usefixtures("in_process")
def test_figures_of_the_device_and_sizes_of_the_model_count_and_old_code_is_forgotten(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def bound(cell: Cell) -> float | None:
        found = ledgers(project, [cell])[cell.hash]
        assert isinstance(found, Ledger)
        return found.tg_bound_tok_s

    slow, fast = composed(project), composed(project, "device.read_bytes_s=1.28e12")
    assert slow.hash == fast.hash
    one, two = bound(slow), bound(fast)
    assert one is not None and two == pytest.approx(2 * one)
    shutil.copy(project.root / "conf/geometry/flash_next.json", project.root / "mine.json")
    mine = composed(project, "model.geometry=mine.json")
    assert bound(mine) == one
    data = json.loads((project.root / "mine.json").read_text())
    data["text_config"]["num_experts_per_tok"] = 20
    (project.root / "mine.json").write_text(json.dumps(data))
    changed = bound(mine)
    assert changed is not None and changed < one
    folders = list((project.cache / "capacity").iterdir())
    assert len(folders) == 1
    monkeypatch.setattr(service, "code_sha256", lambda: "f" * 64)
    bound(slow)
    assert [f.name for f in (project.cache / "capacity").iterdir()] == ["f" * 16]


@pytest.mark.usefixtures("in_process")
def test_a_damaged_cache_is_made_again(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    cell = composed(project)
    first = ledgers(project, [cell])
    (file,) = (project.cache / "capacity").rglob("*.json")
    for damage in ("{", '{"model": "nano"}', "[]"):
        file.write_text(damage)
        assert ledgers(project, [cell]) == first
        assert "cached ledger not readable" in capsys.readouterr().err


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("model.geometry=''",), "the sizes of flash_next are not known: no models/Qwen3.8-Flash-Next/config.json and no model.geometry"),
        (("path=gguf_plugin", "path.components.experts.codec='gguf:IQ9'"), "path.components.experts: codec gguf:IQ9: unknown type; choose from: gguf:F32"),
        (("path=tiered", "path.components.ple.codec=w3_levels"), "path.components.ple: codec w3_levels"),
        (("model.arch=qwen3",), "conf/geometry/flash_next.json: field intermediate_size is missing"),
    ],
)
def test_what_cannot_be_accounted_says_why_in_one_line(project: Project, words: tuple[str, ...], reason: str) -> None:
    cell = composed(project, *words)
    found = ledgers(project, [cell, composed(project, "layers=6")])
    no = found[cell.hash]
    assert isinstance(no, NoLedger) and reason in no.reason and "\n" not in no.reason
    assert sum(isinstance(one, Ledger) for one in found.values()) == 1


@pytest.mark.usefixtures("in_process")
def test_a_file_of_sizes_that_is_no_json_object_says_so(project: Project) -> None:
    cell = composed(project)
    for text in ("[1]", "7"):
        (project.root / "sizes.json").write_text(text)
        for arch in ("qwen4_exp", "qwen3"):
            changed = cell.model.model_copy(update={"geometry": "sizes.json", "arch": arch})
            wrong = cell.model_copy(update={"model": changed})
            assert ledgers(project, [wrong])[wrong.hash] == NoLedger(reason="sizes.json: expected an object of fields")


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("arch", "field", "value", "reason"),
    [
        ("qwen3_moe", "num_experts_per_tok", 9999, "sizes.json: field num_experts_per_tok: 9999 must be at most 128"),
        ("qwen4_exp", "num_experts_per_tok", 9999, "num_experts_per_tok must be 1..num_experts"),
        ("qwen3_moe", "vocab_size", 10**400, "sizes.json: sizes that cannot be counted (OverflowError: "),
        ("qwen4_exp", "linear_conv_kernel_dim", 10**18, "sizes.json: sizes that cannot be counted (RuntimeError: "),
    ],
)
def test_sizes_that_cannot_be_counted_do_not_spoil_the_other_cells(project: Project, arch: str, field: str, value: int, reason: str) -> None:
    good, name = composed(project), "flash_next" if arch == "qwen4_exp" else "qwen3_30b_a3b"
    data = json.loads((project.root / f"conf/geometry/{name}.json").read_text())
    data.get("text_config", data)[field] = value
    (project.root / "sizes.json").write_text(json.dumps(data))
    path = "expert_q2" if arch == "qwen4_exp" else "reference"
    wrong = composed(project, f"model={name}", f"path={path}", "layers=2")
    wrong = wrong.model_copy(update={"model": wrong.model.model_copy(update={"geometry": "sizes.json"})})
    found = ledgers(project, [wrong, good])
    no = found[wrong.hash]
    assert isinstance(no, NoLedger) and reason in no.reason and "\n" not in no.reason
    assert isinstance(found[good.hash], Ledger)


def test_a_process_that_fails_is_one_line(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(LabError, match="the capacity ledger could not be made: its process ended with exit code 1"):
        ledgers(project, [composed(project)])
