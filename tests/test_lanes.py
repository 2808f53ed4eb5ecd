"""Lanes of cells with a time limit: order, a GPU and a runs folder each, what is late. What it does not prove: anything about a GPU."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from experiments import lanes

FAKE = """
import os, signal, sys, time
where = os.environ["LAB_RUNS"]
os.makedirs(where, exist_ok=True)
print(sys.argv[1:], os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
if sys.argv[1] == "export":
    open(sys.argv[2], "w").write("records")
elif "slow=1" in sys.argv:
    signal.signal(signal.SIGINT, lambda *_: (open(where + "/closed", "w").close(), sys.exit(130)))
    time.sleep(60)
sys.exit(3 if "gap=1" in sys.argv else 0)
"""


@pytest.fixture
def lab(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "fake.py").write_text(FAKE)
    return sys.executable, str(tmp_path / "fake.py")


def test_cells_are_run_in_order_on_their_gpu_and_exported(tmp_path: Path, lab: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = lanes.run_lane("mine", 1, lanes.cells_of("a=1/x b=2 / gap=1"), time.monotonic() + 100, tmp_path, lab)
    assert found == [("a=1/x b=2", 0), ("gap=1", 3)]
    log = (tmp_path / "lane-1.log").read_text().splitlines()
    assert log[0] == "['run', 'experiment=mine', 'a=1/x', 'b=2'] 1" and "'gap=1'" in log[1] and "'export'" in log[2]
    assert (tmp_path / "records-1.jsonl.gz").read_text() == "records"


def test_what_is_late_is_interrupted_or_not_started(tmp_path: Path, lab: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "LEAST_S", 1.0)
    monkeypatch.setattr(lanes, "GRACE_S", 4.0)
    found = lanes.run_lane("mine", 0, lanes.cells_of("slow=1 / a=1"), time.monotonic() + 6, tmp_path, lab)
    assert found == [("slow=1", "interrupted"), ("a=1", "not started")]
    assert (tmp_path / "runs-0" / "closed").exists() and (tmp_path / "records-0.jsonl.gz").exists()


def test_of_several_visible_gpus_each_lane_takes_its_own(tmp_path: Path, lab: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    lanes.run_lane("mine", 1, [["a=1"]], time.monotonic() + 100, tmp_path, lab)
    assert (tmp_path / "lane-1.log").read_text().splitlines()[0].endswith("] 5")


@pytest.mark.parametrize("lane", ["", "a=1 / ", "path"])
def test_a_lane_that_says_nothing_is_a_wrong_command(lane: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        lanes.main(["mine", "--out", str(tmp_path / "o"), "--lane", lane])
    assert "--lane" in capsys.readouterr().err and not (tmp_path / "o").exists()
