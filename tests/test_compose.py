"""Composition: every choice composes, every mistake is one line that names the key, every fill command leads back to its cell."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from lab import devices
from lab.cell import Cell
from lab.codecs import create
from lab.compose import ARCHITECTURES, AUTO_ARCH, compose_cells, plan
from lab.errors import LabError
from lab.fill import fill_command, fill_words
from lab.overrides import GROUPS, choices
from lab.project import Project
from tests.runner_helpers import ROOT, cell_of, make_project

PATHS = choices(ROOT / "conf", "path")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return make_project(tmp_path_factory.mktemp("project") / "p")


def test_the_paths_of_the_design_are_there() -> None:
    assert {"reference", "paiton_native", "ple_q2", "expert_q2", "tiered", "cpu_cold", "gguf_plugin", "kestrel_vqf"} <= set(PATHS)


@pytest.mark.parametrize("path", PATHS)
def test_every_path_composes_and_can_be_filled(project: Project, path: str) -> None:
    cell = cell_of(project, f"path={path}", "layers=12")
    assert cell.path.name == path
    assert {rule.component for rule in cell.path.evidence} == set(cell.path.components)
    assert Cell.model_validate(json.loads(json.dumps(cell.model_dump(mode="json")))).hash == cell.hash
    for part in cell.path.components.values():
        if cell.path.unsupported is None and cell.path.server is None and part.codec != "source":
            create(part.codec, part.options)


@pytest.mark.parametrize("file", sorted((ROOT / "conf").rglob("*.yaml")), ids=lambda f: f"{f.parent.name}/{f.stem}")
def test_configuration_files_are_short_and_named_like_their_content(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 30
    if file.parent.name in GROUPS.values():
        assert yaml.safe_load(file.read_text())["name"] == file.stem


def test_the_evidence_follows_a_changed_codec(project: Project) -> None:
    cell = cell_of(project, "path=expert_q2", "path.components.experts.codec=q2_levels")
    assert [rule.op for rule in cell.path.evidence if rule.component == "experts"] == ["q2_levels"]


def test_layers_default_to_all_of_the_model(project: Project) -> None:
    assert cell_of(project).layers == 12


def test_layers_may_be_given_where_the_model_is_absent(project: Project) -> None:
    assert cell_of(project, "model.artifact=nowhere", "layers=40").layers == 40
    with pytest.raises(LabError, match=r"nowhere/config\.json is missing"):
        cell_of(project, "model.artifact=nowhere")


def test_device_is_found_out_unless_given(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.compose.auto_device", lambda: "cuda")
    assert plan(project, []).cells[0].device.name == "cuda"
    assert plan(project, ["device=auto"]).cells[0].device.name == "cuda"
    assert plan(project, ["device=cpu"]).cells[0].device.name == "cpu"


def test_no_gpu_is_assumed_where_they_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_torch_has_gpu_build", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.auto_device.__wrapped__() == "cpu"


def test_a_gpu_that_does_not_answer_is_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(devices, "_torch_has_gpu_build", lambda: True)
    monkeypatch.setattr(devices, "shows_gpu", lambda: True)
    monkeypatch.setattr(devices, "ASK_S", 0.0)
    assert devices.auto_device.__wrapped__() == "cpu"
    assert capsys.readouterr().err == "warning: torch did not say within 0 s whether it can use the GPU; device=auto is cpu\n"


def test_a_stride_below_the_context_composes(project: Project) -> None:
    assert cell_of(project, "bench.ppl_context=1024", "bench.ppl_stride=1023").bench.ppl_stride == 1023


def test_the_architectures_are_those_of_the_configuration() -> None:
    assert {yaml.safe_load(file.read_text())["arch"] for file in (ROOT / "conf" / "model").glob("*.yaml")} <= {*ARCHITECTURES, AUTO_ARCH}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench.ppl_stride=512", r"^bench\.ppl_stride=512 must be below bench\.ppl_context=512$"),
        ("bench.ppl_context=200", r"^bench\.ppl_stride=256 must be below bench\.ppl_context=200$"),
        ("model.arch=gpt9", "^model.arch=gpt9: no such architecture; choose one of: qwen4_exp"),
        ("path=expert_q3", r"path=expert_q3: no such path \(did you mean expert_q2.*choose one of: .*reference.*tiered"),
        ("layers=13", "layers=13: nano has 12 layers; choose 1 to 12$"),
        ("layers=0", "layers=0: nano has 12 layers; choose 1 to 12$"),
        ("layers=abc", "layers=abc: not a whole number; choose 1 to 12$"),
        ("layers=", "layers=: not a whole number"),
        ("layers=true", "not a whole number"),
        ("benhc=quick", r"benhc: unknown key \(did you mean bench"),
        ("bench.repeat=9", r"bench\.repeat: unknown key \(did you mean bench\.repeats"),
        ("repeats=9", r"repeats: unknown key \(did you mean bench\.repeats"),
        ("bench.repeats=2", r"bench\.repeats=2: .*greater than or equal to 5"),
        ("bench.repeats=many", r"bench\.repeats=many: .*integer"),
        ("device=gpu", "device=gpu: no such device.*cpu, cuda, .*auto"),
        ("engine=warp", "engine=warp: no such engine; choose one of: auto, local, llama_cpp, transformers, server"),
        ("force=maybe", "force=maybe: must be true or false"),
        ("path.components.experts.codec=q9", r"path\.components\.experts: .*q9.*q2_g32"),
        ("path.components.experts.options.colour=red", r"path\.components\.experts: .*colour"),
        ("path.components.experts.placement=moon", r"placement=moon"),
        ("+path.components.tail.codec=bf16", r"path\.components\.tail: no such component; choose from experts"),
        ("path.name=mine", r"path\.name=mine: the name is that of the file"),
        ("+extra=1", "extra: unknown key"),
        ("~bench.repeats", r"bench\.repeats: "),
        ("hydra.run.dir=x", "own settings have no effect"),
        ("experts", "'experts' is not understood: write key=value"),
        ("lay ers=[1", "cannot read"),
        ("engine=${nowhere}", "configuration: .*nowhere"),
        ("layers=3,6", r"layers=3,6: several values .* add -m"),
        ("layers=3 layers=6", "layers is given twice"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(project: Project, words: str, message: str) -> None:
    with pytest.raises(LabError, match=message) as caught:
        plan(project, ["path=expert_q2", *words.split(" ")] if not words.startswith(("path=", "lay ")) else [words])
    assert "\n" not in str(caught.value)


def test_a_broken_configuration_file_is_one_line(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p")
    (project.root / "conf").unlink()
    for folder in ("model", "paths", "device", "bench"):
        (project.root / "conf" / folder).mkdir(parents=True)
    (project.root / "conf" / "config.yaml").write_text("defaults: [\n")
    with pytest.raises(LabError, match="configuration: ") as caught:
        plan(project, [])
    assert "\n" not in str(caught.value)


def test_a_sweep_crosses_its_axes_in_order_and_holds_each_cell_once(project: Project) -> None:
    cells = compose_cells(["path=reference,expert_q2", "layers=3,6,3", "device=cpu"], project)
    assert [(c.path.name, c.layers) for c in cells] == [("reference", 3), ("reference", 6), ("expert_q2", 3), ("expert_q2", 6)]


def test_ranges_and_globs_are_swept(project: Project) -> None:
    cells = compose_cells(["path=glob(*_q2)", "layers=range(3,5)", "device=cpu"], project)
    assert [(c.path.name, c.layers) for c in cells] == [("expert_q2", 3), ("expert_q2", 4), ("ple_q2", 3), ("ple_q2", 4)]
    for bad in ("path=glob(zz*)", "layers=interval(1,3)", "engine=glob(*)"):
        with pytest.raises(LabError):
            compose_cells([bad, "device=cpu"], project)


def test_one_wrong_cell_stops_a_sweep_before_it_starts(project: Project) -> None:
    with pytest.raises(LabError, match="layers=13"):
        plan(project, ["layers=3,13", "device=cpu"], multirun=True)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["path=expert_q2", "layers=3", "bench=standard"],
        ["path=expert_q2", "path.components.experts.codec=q2_levels", "bench.repeats=9", "bench.timeout_s=1e-2"],
        ["path=paiton_native", "model.artifact='/data/my models/it\\'s'", "layers=7"],
        ["path=tiered", "+path.unsupported=''", "path.components.experts.options.note='a b, {c}: $HOME \"x\"'", "path.components.experts.options.n=3"],
        ["path=gguf_plugin", "model=nano", "artifact=models/my.gguf", "engine=llama_cpp"],
        ["path=tiered", "+path.unsupported=''", "path.components.experts.options.deep={a:[1,x,null,true],b:'1'}"],
        ["path=reference", "path.evidence=[{component:experts,op:bf16,residency:0.5}]"],
        ["path=reference", "path.title='12'", "+path.unsupported='not today'"],
        ["path=kestrel_vqf", "~path.components.head", "path.evidence=[]"],
        ["path=kestrel_vqf", "path.components.trunk.codec='vqf:Q8_0'", "model.trained_depths=[]"],
    ],
)
def test_the_fill_command_composes_to_the_same_cell(project: Project, words: list[str]) -> None:
    cell = cell_of(project, *words)
    command = fill_command(project, cell)
    assert command.startswith("python -m lab run model=nano path=")
    # Through a real shell, as a person would paste it.
    printed = command.replace("python -m lab run", r"printf '%s\n'", 1)
    shown = subprocess.run(["sh", "-c", printed], capture_output=True, text=True, check=True)
    pasted = shown.stdout.splitlines()
    assert pasted == list(fill_words(project, cell))
    again = plan(project, pasted).cells
    assert again == (cell,)
    assert again[0].hash == cell.hash


def test_a_plain_cell_has_a_plain_fill_command(project: Project) -> None:
    cell = cell_of(project, "path=expert_q2", "layers=3")
    assert fill_command(project, cell) == "python -m lab run model=nano path=expert_q2 layers=3 device=cpu bench=quick"


def test_options_without_a_codec_to_take_them_are_refused(project: Project) -> None:
    with pytest.raises(LabError, match="path.components.experts: codec source takes no options, got group; choose a codec too"):
        plan(project, ["path=reference", "layers=3", "path.components.experts.options.group=3"])


@pytest.mark.parametrize(
    "words",
    [
        ("path=expert_q2", "layers=3"),
        ("path=expert_q2", "layers=3", "path.components.experts.codec=q2_levels"),
        ("path=reference", "bench.repeats=9", "bench=thorough", "model.trained_depths=[1,2]"),
        ("path=tiered", "placement.slots=4", "mode=eager", "model.corpus='a b.txt'"),
        ("path=expert_q2", "path.components.experts={codec: w3_levels}"),
    ],
)
def test_plain_changes_compose_to_what_hydra_composes(project: Project, words: tuple[str, ...]) -> None:
    (quick,) = plan(project, [*words, "device=cpu"]).cells
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lab.compose.is_plain_change", lambda override: False)
        (slow,) = plan(project, [*words, "device=cpu"]).cells
    assert quick == slow


def test_a_path_that_names_a_server_runs_on_it_and_no_other_does(project: Project) -> None:
    assert cell_of(project, "path=vllm_gguf", "layers=12").engine == "server"
    with pytest.raises(LabError, match="layers=3: the server of path vllm_gguf is not told how many layers to keep, so it runs all 12; use layers=12"):
        cell_of(project, "path=vllm_gguf", "layers=3")
    assert cell_of(project, "path=expert_q2", "layers=3").engine == "local"
    with pytest.raises(LabError, match="engine=local: path vllm_gguf names a server; use engine=auto"):
        cell_of(project, "path=vllm_gguf", "layers=12", "engine=local")
    with pytest.raises(LabError, match="engine=server: path expert_q2 names no server"):
        cell_of(project, "path=expert_q2", "layers=3", "engine=server")
