"""Lanes of cells with a time limit: order, a GPU and a runs folder each, what is late, what a signal does. What it does not prove: anything about a GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments import lanes
from experiments.lanes import Lane, Queue, cells_of, gpus_of, run_lanes
from lab.signals import StopSignals

FAKE = """
import os, signal, sys, time
where = os.environ["LAB_RUNS"]
os.makedirs(where, exist_ok=True)
print(sys.argv[1:], os.environ["CUDA_VISIBLE_DEVICES"], os.environ["HIP_VISIBLE_DEVICES"], flush=True)
if sys.argv[1] == "export":
    open(sys.argv[2], "w").write("records")
elif "slow=1" in sys.argv or "deaf=1" in sys.argv:
    signal.signal(signal.SIGINT, (lambda *_: (open(where + "/closed", "w").close(), sys.exit(130))) if "slow=1" in sys.argv else signal.SIG_IGN)
    open(where + "/begun", "w").close()
    time.sleep(60)
sys.exit(3 if "gap=1" in sys.argv else 0)
"""
NEVER = StopSignals()
"""Not entered: nothing is noted."""


@pytest.fixture
def lab(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "fake.py").write_text(FAKE)
    return sys.executable, str(tmp_path / "fake.py")


def test_cells_are_run_in_order_on_their_gpu_and_exported(tmp_path: Path, lab: tuple[str, str]) -> None:
    lane = Lane("mine", 1, "5", cells_of("a=1/x b=2 / gap=1"), tmp_path, lab)
    lane.run(time.monotonic() + 100, NEVER)
    assert lane.outcomes == [("a=1/x b=2", 0), ("gap=1", 3)]
    log = (tmp_path / "lane-1.log").read_text().splitlines()
    assert log[0] == "['run', 'experiment=mine', 'a=1/x', 'b=2'] 5 5" and "'gap=1'" in log[1] and "'export'" in log[2]
    assert (tmp_path / "records-1.jsonl.gz").read_text() == "records"


@pytest.mark.parametrize(("word", "told"), [("slow=1", "interrupted"), ("deaf=1", "killed, its record is closed by the next command")])
def test_what_is_late_is_interrupted_or_not_started(word: str, told: str, tmp_path: Path, lab: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("LEAST_S", 1.0), ("GRACE_S", 2.0), ("EXPORT_S", 0.5)):
        monkeypatch.setattr(lanes, name, seconds)
    lane = Lane("mine", 0, "0", cells_of(f"{word} / a=1"), tmp_path, lab)
    lane.run(time.monotonic() + 5, NEVER)
    assert lane.outcomes == [(word, told), ("a=1", "not started")]
    assert (tmp_path / "runs-0" / "closed").exists() == (word == "slow=1") and (tmp_path / "records-0.jsonl.gz").exists()


def test_what_is_left_goes_to_whichever_lane_is_free(tmp_path: Path, lab: tuple[str, str]) -> None:
    then = Queue(cells_of("500: c=1 / d=1 / 5: e=1"))
    both = [Lane("mine", number, str(number), cells_of("a=1 / 300: b=1"), tmp_path, lab, then=then) for number in (0, 1)]
    assert run_lanes(both, 120) == 1, "not all were started"
    first, second = (lane.outcomes for lane in both)
    assert first[:2] == second[:2] == [("a=1", 0), ("b=1", "not started")], "with less than 300 seconds it is not begun"
    assert sorted(first[2:] + second[2:]) == [("d=1", 0), ("e=1", 0)] and [one.words for one in then.left] == [("c=1",)]


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_lanes_with_their_records_and_starts_nothing_more(sign: signal.Signals, tmp_path: Path, lab: tuple[str, str]) -> None:
    program = (
        "import sys; from pathlib import Path; from experiments.lanes import Lane, cells_of, run_lanes\n"
        f"out, lab = Path({str(tmp_path)!r}), {lab!r}\n"
        "sys.exit(run_lanes([Lane('mine', n, str(n), cells_of('slow=1 / a=1'), out, lab) for n in (0, 1)], 300))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    main = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not all((tmp_path / f"runs-{n}" / "begun").exists() for n in (0, 1)) and time.monotonic() < deadline:
        time.sleep(0.05)
    main.send_signal(sign)
    told, error = main.communicate(timeout=60)
    assert main.returncode == 130 and not error and "4 cells: 0 OK, 0 recorded gaps, 4 others\nnot started: a=1; a=1" in told
    for n in (0, 1):
        assert (tmp_path / f"runs-{n}" / "closed").exists() and (tmp_path / f"records-{n}.jsonl.gz").exists()


@pytest.mark.parametrize(
    ("environment", "found"),
    [({}, ["0", "1"]), ({"CUDA_VISIBLE_DEVICES": "3,5,6"}, ["3", "5", "6"]), ({"HIP_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "0,1"}, ["4", "5"])],
)
def test_lanes_stay_within_the_gpus_that_are_visible(environment: dict[str, str], found: list[str]) -> None:
    assert gpus_of(2, environment) == found
    assert gpus_of(1, {"CUDA_VISIBLE_DEVICES": "4"}) == ["4"] and gpus_of(1, {"CUDA_VISIBLE_DEVICES": "1,-1"}) == ["1"]
    for none in ("", "-1", "0,0"):
        with pytest.raises(ValueError, match="2 lanes and [01] visible GPUs"):
            gpus_of(2, {"CUDA_VISIBLE_DEVICES": none})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--lane", ""], "'': cells"),
        (["--lane", "a=1 / "], "'a=1 / ': cells"),
        (["--lane", "path"], "'path': cells are KEY=VALUE words"),
        (["--lane", "a=1", "--then", "x: a=1"], "'x: a=1': cells are KEY=VALUE words"),
        (["--lane", "a=1", "--lane", "a=2", "--lane", "a=3"], "3 lanes and 2 visible GPUs (4,5)"),
        (["--lane", "a=1", "--seconds", "20"], "--seconds 20: at least 60"),
        (["--lane", "a=1", "--seconds", "nan"], "--seconds nan: at least 60"),
        (["--lane", "200:a=1"], "'200:a=1': cells are KEY=VALUE words"),
        (["--lane", "²: a=1"], "'²: a=1': cells are KEY=VALUE words"),
        (["--lane", "a=1", "--then", ""], "'': cells are KEY=VALUE words"),
        (["--lane", "a=1", "--then", "500: b=1", "--seconds", "100"], "b=1 needs 500 s, and --seconds 100 leaves fewer"),
    ],
)
def test_what_cannot_be_run_is_a_wrong_command(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(SystemExit, match="2"):
        lanes.main(["nano", "--out", str(tmp_path / "o"), *words])
    assert told in capsys.readouterr().err and not (tmp_path / "o").exists()


def test_an_experiment_or_a_folder_that_there_cannot_be_is_a_wrong_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for name, out, told in (("nosuch", "o", "nosuch"), ("nano", "file", "File exists")):
        with pytest.raises(SystemExit, match="2"):
            lanes.main([name, "--out", str(tmp_path / out), "--lane", "a=1"])
        assert told in capsys.readouterr().err


def test_a_lane_that_cannot_go_on_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_lanes([Lane("mine", 0, "0", cells_of("a=1"), tmp_path, (str(tmp_path / "missing"),))], 100) == 1
    assert "lane 0: failed: " in capsys.readouterr().out
