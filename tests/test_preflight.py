"""The gates before any file is read: what a path runs at all, in the words that the record keeps."""

from __future__ import annotations

import pytest

from lab.compose import compose_cells
from lab.placement.kinds import refused_before_loading
from lab.preflight import clear
from lab.project import Project
from lab.record import Status
from tests.runner_helpers import ROOT, cell_of

PROJECT = Project(root=ROOT, runs=ROOT / "runs")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ("path=gguf_plugin",),
            "and experiments/nano is none: give artifact=FILE.gguf, or make one with python -m lab convert experiments/nano models/nano/nano.gguf --to gguf",
        ),
        (("path=gguf_plugin", "artifact=synthetic"), "artifact=synthetic is for paths that choose their codecs"),
        (("path=kestrel_vqf",), "VQF files hold models of the qwen3 family, not qwen4_exp"),
        (("model=qwen3_8b", "path=kestrel_vqf"), "models/qwen3_8b/qwen3_8b.vqf --to vqf --wmode q4"),
        (("model=smollm2", "path=gguf_plugin", "model.artifact=models/folder"), "give artifact=FILE.gguf"),
    ],
)
def test_a_path_for_another_kind_of_file_is_a_gap_that_says_what_would_run(words: tuple[str, ...], reason: str) -> None:
    stop = clear(PROJECT, cell_of(PROJECT, *words), force=False).stop
    assert stop is not None and stop[0] is Status.UNSUPPORTED and reason in stop[1]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("path=tiered", "device=cpu", "placement.slots=8"), "tiered placement keeps experts in front of a second memory, and device=cpu has only one"),
        (("path=cpu_cold", "device=cpu", "placement.slots=8"), "cpu_cold placement keeps experts in front of a second memory"),
        (("path=tiered", "device=h200"), "give placement.slots=N (experts a layer) or placement.resident_layers=N"),
    ],
)
def test_experts_kept_in_part_need_a_second_memory_and_a_number(words: tuple[str, ...], reason: str) -> None:
    stop = clear(PROJECT, compose_cells(["model=nano", "layers=3", *words], PROJECT)[0], force=False).stop
    assert stop is not None and stop[0] is Status.UNSUPPORTED and reason in stop[1]


def test_a_servers_own_placement_is_its_own_affair() -> None:
    cell = compose_cells(["model=flash_next", "layers=48", "path=strata_server", "device=cpu"], PROJECT)[0]
    assert cell.path.components["experts"].placement == "cpu_cold" and refused_before_loading(cell) is None


@pytest.mark.parametrize(
    "words", [("model=nano", "path=gguf_plugin", "artifact=x.gguf"), ("model=qwen3_8b", "path=kestrel_vqf", "artifact=synthetic"), ("path=expert_q2",)]
)
def test_a_path_that_runs_the_file_is_clear(words: tuple[str, ...]) -> None:
    assert clear(PROJECT, cell_of(PROJECT, *words), force=False).stop is None


@pytest.mark.parametrize(("names", "nodes", "stopped"), [((), False, True), ((), True, False), (("NVIDIA H200",), False, False)])
def test_a_gpu_that_nothing_shows_is_not_here(names: tuple[str, ...], nodes: bool, stopped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name under /proc or a node under /dev is enough: containers may lack either."""
    monkeypatch.setattr("lab.preflight.accelerators", lambda: names)
    monkeypatch.setattr("lab.preflight.shows_gpu", lambda: nodes)
    on_gpu, on_cpu = (compose_cells(["path=expert_q2", "layers=3", device], PROJECT)[0] for device in ("device=cuda", "device=cpu"))
    stop = clear(PROJECT, on_gpu, force=False).stop
    assert (stop is not None) == stopped and (stop is None or (stop[0] is Status.UNSUPPORTED and "device=cuda is not here" in stop[1]))
    assert clear(PROJECT, on_cpu, force=False).stop is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("path=tiered", "placement.slots=513"), "placement.slots=513: the model has 512 experts a layer; choose 1 to 512"),
        (("path=cpu_cold", "placement.slots=600"), "placement.slots=600: the model has 512 experts a layer; choose 1 to 512"),
        (
            ("path=expert_q2", "placement.slots=64"),
            "placement.slots=64: path expert_q2 keeps no component in part this way here; use path=tiered",
        ),
        (("path=expert_q2", "placement.resident_layers=2"), "placement.resident_layers=2: path expert_q2 keeps no component in part this way"),
        (("path=llama_server", "placement.slots=4"), "placement.slots=4: path llama_server keeps no component in part this way"),
        (("path=tiered", "placement.slots=4", "engine=transformers"), "engine=transformers holds weights as they are computed with"),
        (("path=tiered", "model=qwen3_small", "placement.slots=8"), "tiered placement keeps routed experts in part, and this model has none"),
        (
            ("path=kestrel_vqf", "model=qwen3_8b", "artifact=synthetic", "placement.resident_layers=2"),
            "placement.resident_layers=2: path kestrel_vqf keeps no component in part",
        ),
        (("path=tiered", "path.components.trunk.placement=tiered"), "path.components.trunk.placement=tiered: only experts can be kept in part"),
        (("path=expert_q2", "path.components.ple.placement=cpu_cold"), "path.components.ple.placement=cpu_cold: only experts can be kept in part"),
    ],
)
def test_a_placement_that_cannot_mean_what_it_says_is_a_gap_and_its_cell_still_composes(words: tuple[str, ...], told: str) -> None:
    """A gap, not a wrong command: records that were made before this was refused must still be shown by their experiments."""
    model = [] if any(word.startswith("model=") for word in words) else ["model=flash_next"]
    (cell,) = compose_cells([*model, "device=rtx5090", *words], PROJECT)
    stop = clear(PROJECT, cell, force=False).stop
    assert stop is not None and stop[0] is Status.UNSUPPORTED and stop[1].startswith(told)


def test_placements_at_their_limits_are_stopped_by_nothing_but_the_device() -> None:
    for words in (
        ("model=flash_next", "path=tiered", "placement.slots=512"),
        ("model=flash_next", "path=cpu_cold", "placement.resident_layers=48"),
        ("model=qwen3_8b", "path=kestrel_vqf", "placement.slots=999", "artifact=synthetic"),
    ):
        (cell,) = compose_cells([*words, "device=rtx5090"], PROJECT)
        stop = clear(PROJECT, cell, force=False).stop
        assert stop is not None and stop[1].startswith("device=rtx5090 is not here")
