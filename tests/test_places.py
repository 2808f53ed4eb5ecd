"""No path of the machine in a record: folders are replaced by what they are, the cell and its command stay, and what is left over is found."""

from __future__ import annotations

import sys
from pathlib import Path

from lab.places import absolute_paths, known_places, without_places
from lab.record import Gap, Status
from tests.matrix_helpers import PROVENANCE, cell, record

PLACES = {"/home/ann/lab/runs": "runs", "/home/ann/lab": ".", "/home/ann": "~"}


def test_places_are_replaced_wherever_text_is_kept_and_the_cell_stays() -> None:
    origin = PROVENANCE | {"command": ["/home/ann/lab/.venv/bin/python", "x"], "fill": "python -m lab run artifact=/home/ann/lab/models/a", "lab_pid": 7}
    tail = ['  File "/home/ann/lab/lab/worker.py", line 3', "/home/annette/lab and /home/ann/lab.old are other folders"]
    whole = record(
        cell(),
        status=Status.CRASHED,
        reason="no /home/ann/lab/runs/x/001",
        gaps={"ppl": Gap(status=Status.CRASHED, reason="in /home/ann/.cache", fill="run")},
        provenance=origin,
        evidence={"log_tail": tail, "deep": [{"count": 3}]},
        notes=["/home/ann"],
    )
    found = without_places(whole, PLACES)
    assert found.provenance["command"] == ["./.venv/bin/python", "x"] and found.provenance["fill"] == origin["fill"] and found.provenance["lab_pid"] == 7
    assert found.evidence == {"log_tail": ['  File "./lab/worker.py", line 3', "/home/annette/lab and ~/lab.old are other folders"], "deep": [{"count": 3}]}
    assert (found.reason, found.notes, found.gaps["ppl"].reason) == ("no runs/x/001", ["~"], "in ~/.cache")
    assert found.cell == whole.cell and found.metrics == whole.metrics


def test_the_machines_own_places_are_known() -> None:
    known = known_places()
    assert known[str(Path(__file__).resolve().parents[1])] == "." and sys.prefix in known
    assert list(known) == sorted(known, key=len, reverse=True) and "/" not in known


def test_what_is_left_over_is_found() -> None:
    assert list(absolute_paths({"a": ["see /home/bob/x.py, line 3"], "b": {"c": "/opt/venv/lib"}})) == ["/home/bob/x.py", "/opt/venv/lib"]
    assert not list(absolute_paths(["~/x", "./tmp/x", "sqlite:///runs/x.db", "tok/s", "/tmp: 3 GiB free", "/dev/shm: full"]))
