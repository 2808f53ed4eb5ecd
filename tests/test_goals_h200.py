"""The table of goals refuses what it cannot read, in one line, and then writes nothing. What it does not prove: any goal."""

from __future__ import annotations

import errno
import gzip
from pathlib import Path

import pytest

from experiments.goals_h200 import Line, _number, _reached, main
from lab.record import Measurement

ROW = '{"name": "q2_g32", "what": "gate+up", "tokens": 1, "us": %s, "ratio": 1.0}'


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("humming.json", b"{", "humming.json: Invalid JSON"),
        ("humming.json", b"[]", "humming.json: Input should be an object"),
        ("humming.json", b"{}", "humming.json: rows: Field required"),
        ("humming.json", b'{"rows": 3}', "humming.json: rows: Input should be a valid array"),
        ("humming.json", b'{"rows": [{"codec": "q2_g32"}]}', "humming.json: rows.0.name: Field required"),
        ("humming.json", f'{{"rows": [{ROW % 0}]}}'.encode(), "humming.json: rows.0.us: Input should be greater than 0"),
        ("humming.json", f'{{"rows": [{ROW % "Infinity"}]}}'.encode(), "humming.json: rows.0.us: Input should be a finite number"),
        ("records.jsonl.gz", b"junk", "no whole gzip file"),
        ("records.jsonl.gz", b"", "no export of the lab"),
        ("records.jsonl.gz", gzip.compress(b'{"cell_id": 1}\n' * 99)[:40], "no whole gzip file"),
        ("records.jsonl.gz", gzip.compress(b"{\n"), "no export of the lab"),
    ],
    ids=range(11),  # a gzip file holds the time: its bytes in a name would make another test of it in every process
)
def test_what_cannot_be_read_is_one_line(name: str, content: bytes, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_bytes(content)
    out = tmp_path / "out"
    out.mkdir()
    assert main(["--folder", str(tmp_path), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and told in error and error.count("\n") == 1 and not list(out.iterdir())


def test_a_folder_that_is_not_there_leaves_the_committed_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--folder", str(tmp_path / "no"), "--out", str(tmp_path)]) == 2
    assert "no such folder" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_folder_to_write_to_must_be_there(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for wrong in ("no", "file"):
        assert main(["--out", str(tmp_path / wrong)]) == 2
        assert capsys.readouterr().err == f"error: --out {tmp_path / wrong}: no such folder\n"

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("experiments.goals_h200.write_atomic", full)
    assert main(["--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("goals_h200.md: not written: No space left on device\n")


@pytest.mark.parametrize("lanes", [None, 0, "4", float("nan")])
def test_a_record_that_does_not_say_what_its_share_is_of_is_not_measured(lanes: object) -> None:
    found = Measurement(value=300.0, unit="tok/s", protocol="tg@1", details={"lanes": lanes})
    assert _number(found, "lanes") is None and _number(found, "bytes_per_step") is None
    assert _number(Measurement(value=1.0, unit="tok/s", protocol="tg@1", details={"lanes": 4}), "lanes") == 4.0


def test_a_goal_just_missed_does_not_read_as_reached() -> None:
    assert _reached(Line("g", 1.5, 8.86 / 5.915, "x", "s", "r")) == "1.498 x (r)"
    assert _reached(Line("g", 1.5, 1.4999996, "x", "s")) == "1.4999996 x" and _reached(Line("g", 1.5, 1.5, "x", "s")) == "1.50 x"
