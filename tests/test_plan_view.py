"""The verb `plan`: what it prints and how it ends, in detail and as a table, at both widths, as JSON, and for wrong words."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from lab.capacity import Ledger
from lab.capacity.plan import plan_cells
from lab.compose import compose_cells
from lab.errors import LabError
from lab.plan_view import plan_command, print_many, print_one
from lab.project import Project
from lab.record import Status
from lab.store import Store
from tests.capacity.helpers import in_process
from tests.engines.kestrel_helpers import kestrel_project
from tests.runner_helpers import make_project, record_of

__all__ = ["in_process"]
pytestmark = pytest.mark.usefixtures("in_process")
FLASH = ("model=flash_next", "device=r9700")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path / "p")


def run(project: Project, *words: str) -> tuple[int, str]:
    out = io.StringIO()
    return plan_command(project, words, out), out.getvalue()


def test_a_cell_that_does_not_fit_says_by_how_much_and_what_would(project: Project) -> None:
    code, text = run(project, *FLASH, "path=paiton_native", "layers=48")
    assert code == 3
    assert "does not fit: device is short by 71.90 GiB (103.90 GiB of 32.00 GiB)" in text
    assert "111.56 GB   103.90" in text
    for line in ("placement.slots=219", "placement.resident_layers=20", "layers=1", "path=strata_server"):
        assert line in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("path=tiered",), "a run would end as UNSUPPORTED: tiered placement was not told how much stays on the GPU"),
        (("path=tiered", "placement.slots=3"), "a run would end as UNSUPPORTED: placement.slots=3: a step of 1 sequence may use 10 different experts"),
        (("path=gguf_plugin", "artifact=synthetic"), "a run would end as UNSUPPORTED: path=gguf_plugin runs GGUF files; artifact=synthetic is for paths"),
        (("path=expert_q2",), "models/Qwen3.8-Flash-Next is not here; the sizes are those of conf/geometry/flash_next.json"),
        (("path=kestrel_vqf", "model=qwen3_8b", "artifact=no.vqf"), "no.vqf is not here; the sizes are those of conf/geometry/qwen3_8b.json"),
    ],
)
def test_what_a_run_would_refuse_stands_beside_the_figures(project: Project, words: tuple[str, ...], told: str) -> None:
    model = [] if any(word.startswith("model=") for word in words) else ["model=flash_next"]
    _, text = run(project, *model, "device=r9700", "layers=6", *words)
    assert told in " ".join(text.split())


def test_a_file_of_another_model_is_told(tmp_path: Path) -> None:
    project, _ = kestrel_project(tmp_path)
    geometry = project.root / "conf" / "geometry" / "qwen3_2b.json"
    words = ("model=qwen3_2b", "path=kestrel_vqf", "artifact=models/m.vqf", "device=cpu")
    assert "a run would refuse" not in run(project, *words)[1]
    geometry.write_text(geometry.read_text().replace('"num_attention_heads": ', '"num_attention_heads": 1'))
    assert "a run would refuse: models/m.vqf: heads " in " ".join(run(project, *words)[1].split())


def test_what_would_fit_can_be_run(project: Project) -> None:
    """Paths for files of another format are no way out for random codes; slots that a step would not find room in are none at all."""
    words = ("path=reference", "layers=48", "--memory=100")
    _, text = run(project, *FLASH, *words)
    assert "path=gguf_plugin" in text and "artifact=FILE.gguf" in text
    _, text = run(project, *FLASH, *words, "artifact=synthetic")
    assert "gguf_plugin" not in text and "placement.slots=" in text
    few = ("path=reference", "layers=6", "path.components.ple.placement=host")  # room for 5 slots, where a token uses 10 experts
    (planned,) = plan_cells(project, compose_cells([*FLASH, *few, "path.components.experts.placement=tiered", "placement.slots=5"], project))
    assert isinstance(planned.ledger, Ledger)
    _, text = run(project, *FLASH, *few, f"--memory={planned.ledger.device_bytes / 2**30 + 0.01:.3f}")
    assert "does not fit" in text and "placement.slots=" not in text


def test_a_cell_that_fits_ends_with_0(project: Project) -> None:
    code, text = run(project, *FLASH, "path=ple_q2", "layers=6")
    assert code == 0 and "fits: device has " in text and "would fit" not in text


def test_every_path_of_flash_next_is_judged_against_three_memories_without_model_files(project: Project) -> None:
    code, text = run(project, "-m", *FLASH, "path=glob(*,exclude=[*_server,vllm_*])", "layers=3,6,24,48", "--memory=32,104,139")
    assert code == 3 and "no ledger: path=kestrel_vqf" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["paiton_native", "48", "103.90", "5.26", "-71.9", "+0.1", "+35.1"] in rows
    assert ["tiered", "48", "13.19", "96.89", "+18.8", "?", "+90.8", "?", "+125.8", "?"] in rows
    most, _, evenly = text.partition("estimated, in tok/s: requests spread evenly")
    bounds, estimates = ([line.split() for line in part.splitlines()] for part in (most, evenly))
    assert ["paiton_native", "48", "116", "298", "6,342"] in estimates
    (bound,) = (row for row in bounds if row[:3] == ["paiton_native", "48", "116"])
    assert all(int(most.replace(",", "")) > least for most, least in zip(bound[3:], (298, 6342), strict=True))
    assert ["cpu_cold", "3", "no", "figure"] in [row[:4] for row in bounds]


@pytest.mark.parametrize("width", [80, 140])
def test_lines_fit_the_screen_and_nothing_is_cut(project: Project, width: int) -> None:
    out = io.StringIO()
    screen = Console(file=out, width=width, highlight=False)
    cells = compose_cells([*FLASH, "path=tiered", "layers=3,48", "placement.resident_layers=20"], project)
    print_many(screen, plan_cells(project, cells, [32, 104, 139]))
    print_one(screen, plan_cells(project, cells[1:], [], suggest=True)[0])
    kestrel = compose_cells(["model=qwen3_8b", "path=kestrel_vqf", "device=rtx5090", "placement.host_budget_mb=7000", "placement.slots=256"], project)
    print_one(screen, plan_cells(project, kestrel, [], suggest=True)[0])
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    assert text.count("resident_layers=20") >= 3
    joined = " ".join(text.split())
    assert "host: 234 of 252 weights resident (placement.host_budget_mb=7000, placement.slots=256)" in joined
    assert "252 slots and a budget of 7452 MB" in joined


def test_json_is_one_document_with_totals_and_verdicts(project: Project) -> None:
    code, text = run(project, *FLASH, "path=expert_q2", "layers=24", "--json", "--memory=32,139")
    document = json.loads(text)
    assert code == 3
    assert [judged["verdict"]["fits"] for judged in document["judged"]] == [False, True]
    parts = sum(line["bytes"] for line in document["ledger"]["lines"]) + document["ledger"]["state_bytes"]
    assert document["ledger"]["device_bytes"] == parts + document["ledger"]["workspace"]["device_bytes"]
    _, many = run(project, "-m", *FLASH, "path=expert_q2,kestrel_vqf", "layers=24", "--json")
    assert ["reason" in one for one in json.loads(many)] == [False, True]


def test_nano_on_the_cpu_has_one_memory_and_no_figures(project: Project) -> None:
    geometry = project.root / "experiments/nano/config.json"
    geometry.write_text((Path(__file__).parents[1] / "experiments/nano/config.json").read_text())
    code, text = run(project, "model=nano", "device=cpu", "path=expert_q2", "layers=3")
    assert code == 0 and "one memory" in text and "TG no figure" in text and "MiB" in text


def test_an_earlier_out_of_memory_raises_the_estimate(project: Project) -> None:
    words = (*FLASH, "path=ple_q2", "layers=6")
    (cell,) = compose_cells(words, project)
    failed = record_of(cell, Status.OOM, evidence={"capacity": {"ledger_bytes": 10 << 30, "device_free_bytes": 15 << 30, "ran_out": "device"}})
    Store(project.runs).add(failed)
    code, text = run(project, *words)
    assert code == 3 and "out of device memory at 6 layers" in " ".join(text.split())
    assert json.loads(run(project, *words, "--json")[1])["estimates"]["device"]["reason"].startswith("raised by 1.500")


def test_an_estimate_is_printed_beside_a_bound_only_where_they_differ(project: Project) -> None:
    assert "estimated, in tok/s: TG " in run(project, *FLASH, "path=tiered", "layers=6", "placement.slots=8")[1]
    assert "estimated, in tok/s" not in run(project, "model=qwen3_8b", "path=kestrel_vqf", "device=rtx5090")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--memory=big",), "--memory=big: a size in GiB above 0 is needed"),
        (("--memory=32,",), "--memory=: a size in GiB above 0 is needed"),
        (("--memory=-1",), "--memory=-1: a size in GiB"),
        (("--memory=inf",), "--memory=inf: a size in GiB"),
        (("--fast",), "--fast: unknown flag of `plan`"),
        (("layers=49", "model=flash_next"), "layers=49: flash_next has 48 layers; choose 1 to 48"),
        (("path=reference,ple_q2",), "several values ask for several runs"),
        (("experiment=none",), "unknown experiment 'none'"),
    ],
)
def test_wrong_words_are_one_line(project: Project, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(LabError, match=message) as caught:
        run(project, *words)
    assert "\n" not in str(caught.value)
