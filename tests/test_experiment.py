"""Experiment files: what they expect, and every mistake as one line that names the file and the line.

The shipped `experiments/nano.yaml` is loaded too, and its cells composed at one depth.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from lab.compose import compose_cells
from lab.errors import LabError
from lab.experiment import load_experiment
from lab.project import Project
from lab.registered import matches
from tests.matrix_helpers import SMALL, small, write_experiment

ROOT = Path(__file__).resolve().parents[1]


def test_axes_are_crossed_on_top_of_the_common_overrides(tmp_path: Path) -> None:
    experiment = small(tmp_path)
    cells = experiment.expected_cells()
    assert len(cells) == 6
    assert cells[0] == ["model=nano", "device=cpu", "bench=standard", "path=reference", "layers=3"]
    assert cells[-1][-2:] == ["path=coarse", "layers=6"]


def test_explicit_cells_come_after_the_axes_and_may_override(tmp_path: Path) -> None:
    experiment = small(tmp_path, SMALL + "cells:\n  - {path: odd, layers: 12, device: cuda, force: true}\n")
    assert experiment.expected_cells()[6] == ["model=nano", "device=cuda", "bench=standard", "path=odd", "layers=12", "force=true"]


def test_only_explicit_cells(tmp_path: Path) -> None:
    text = "name: small\ntitle: t\ndescription: d\nmetrics: [ppl]\ncells:\n  - {path: a, layers: 3}\n  - {path: b, layers: 6}\n"
    assert small(tmp_path, text).expected_cells() == [["path=a", "layers=3"], ["path=b", "layers=6"]]


def test_the_file_hash_is_that_of_its_bytes(tmp_path: Path) -> None:
    assert small(tmp_path).sha256 == hashlib.sha256(SMALL.encode()).hexdigest()


def test_matches_compares_as_on_the_command_line() -> None:
    assert matches({"layers": "12", "path": "a"}, {"layers": 12})
    assert not matches({"layers": "12"}, {"layers": 12, "path": "a"})


def test_targets_are_read(tmp_path: Path) -> None:
    target = "targets:\n  - {metric: pp512_tok_s, comparison: '>=', value: 90, unit: tok/s, source: the post, where: {path: fine}}\n"
    assert small(tmp_path, SMALL + target).targets[0].value == 90.0


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("[ppl, kld_mean,", "[ppl, kld,", 8, "unknown metric 'kld'"),
        ("[ppl, kld_mean,", "[ppl, ppl, kld_mean,", 8, "listed twice"),
        ("title: A small matrix", "titel: A small matrix", 1, "title: Field required"),
        ("description:", "sha256: x\ndescription:", 3, "sha256: unknown key"),
        ("hypotheses:", "dead: 1\nhypotheses:", 9, "dead: unknown key"),
        ("name: small", "name: other", 1, "must equal the file's name 'small'"),
        ("layers: [3, 6]", "layers: []", 7, "axes.layers"),
        ("layers: [3, 6]", "layers: [3, [6]]", 7, "not a plain override value"),
        ("layers: [3, 6]", "layers: ['3,6']", 7, "not a plain override value"),
        ("layers: [3, 6]", "layers: [3, 3]", 5, "is expected twice"),
        ("layers: [3, 6]", "lay ers: [3, 6]", 7, "is not an override key"),
        ("layers: [3, 6]", "layers: [3, 6]\n  model: [nano]", 8, "also set in 'overrides'"),
        ("metric: kld_mean, layers: 6", "metric: load_s, layers: 6", 12, "not among this experiment's metrics"),
        ("fine, coarse], metric", "fine, rough], metric", 12, "path=rough layers=6 must be one expected cell"),
        ("fine, coarse], metric", "fine, fine], metric", 12, "once in the order"),
        ("metric: kld_mean, layers: 6", "metric: kld_mean, layers: six", 12, "layers"),
        ("id: ladder", "id: a ladder", 10, "id"),
        ("axes:", "overrides: {}\naxes:", 5, "the key 'overrides' appears twice"),
        ("layers: [3, 6]", "layers: [3, 6", 8, "not valid YAML"),
    ],
)
def test_a_mistake_is_one_line_with_file_and_line(tmp_path: Path, old: str, new: str, line: int, words: str) -> None:
    assert old in SMALL
    with pytest.raises(LabError) as caught:
        small(tmp_path, SMALL.replace(old, new))
    message = str(caught.value)
    assert message.startswith(f"experiments/small.yaml:{line}: ")
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("{metric: load_s, comparison: '>=', value: 1, unit: s, source: x}", "not among this experiment's metrics"),
        ("{metric: ppl, comparison: '<', value: 1, unit: tok/s, source: x}", "ppl is measured in ppl"),
        ("{metric: ppl, comparison: '<', value: 1, unit: ppl, source: x, where: {path: nowhere}}", "no expected cell matches"),
        ("{metric: ppl, comparison: '~', value: 1, unit: ppl, source: x}", "comparison"),
        ("{metric: ppl, comparison: '<', value: .nan, unit: ppl, source: x}", "value"),
    ],
)
def test_a_target_must_fit_the_matrix(tmp_path: Path, target: str, words: str) -> None:
    with pytest.raises(LabError, match=r"experiments/small\.yaml:14: targets\.0\.") as caught:
        small(tmp_path, f"{SMALL}targets:\n  - {target}\n")
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["", "- a\n", "just words\n", "# only a comment\n"])
def test_a_file_without_keys_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(LabError, match=r"experiments/small\.yaml:1: expected keys and values"):
        small(tmp_path, text)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    directory = write_experiment(tmp_path)
    (directory / "small.yaml").write_bytes(b"name: \xff\xfe\n")
    with pytest.raises(LabError, match=r"experiments/small\.yaml:1: not valid YAML"):
        load_experiment("small", directory)


def test_an_unknown_experiment_lists_the_choices(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="unknown experiment 'nano'; choose from: small"):
        load_experiment("nano", write_experiment(tmp_path))


def test_a_name_cannot_leave_the_directory(tmp_path: Path) -> None:
    directory = write_experiment(tmp_path)
    (tmp_path / "outside.yaml").write_text(SMALL)
    with pytest.raises(LabError, match="unknown experiment"):
        load_experiment("../outside", directory)


def served() -> set[str]:
    """Paths of servers, which need theirs."""
    return {file.stem for file in (ROOT / "conf" / "paths").glob("*.yaml") if file.stem.endswith("_server") or file.stem.startswith("vllm_")}


def test_the_shipped_nano_experiment() -> None:
    nano = load_experiment("nano", ROOT / "experiments")
    assert len(nano.points()) == 28
    assert all(point["device"] == "cpu" and point["bench"] == "standard" for point in nano.points())
    assert [h.id for h in nano.hypotheses] == ["quality-ladder", "costs-add"]
    project = Project(root=ROOT, runs=ROOT / "runs")
    cells = [compose_cells(words, project) for words in nano.expected_cells() if words[-1] == "layers=3"]
    assert [len(found) for found in cells] == [1] * 9
    paths = {point["path"] for point in nano.points()}
    assert paths == {path.stem for path in (ROOT / "conf" / "paths").glob("*.yaml")} - served(), "every path of the local engine"
