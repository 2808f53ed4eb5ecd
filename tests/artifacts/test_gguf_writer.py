"""A written GGUF is what the gguf package reads; a write that does not end well leaves nothing and touches nothing."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from lab.artifacts import gguf_writer
from lab.artifacts.gguf import open_gguf
from lab.artifacts.gguf_writer import MetaValue, Planned, header, total_bytes, writing
from lab.codecs.gguf_types import TYPES
from lab.errors import LabError

TENSORS = (
    Planned("odd", (3, 5, 7), TYPES["F32"]),
    Planned("one", (1,), TYPES["F32"]),
    Planned("q", (9, 96), TYPES["Q8_0"]),
    Planned("two", (2, 3, 2, 64), TYPES["MXFP4"]),
    Planned("last", (1, 256), TYPES["IQ2_XS"]),
)
METADATA: dict[str, MetaValue] = {
    "general.architecture": "none",
    "a.flag": True,
    "a.words": ["", "ü", "日本"],
    "a.u64": np.array([2**63 + 1, 23703573157769], dtype=np.uint64),
    "a.i32": np.array([-1, 0, 7], dtype=np.int32),
    "a.bools": np.array([True, False, True]),
    "a.f32": np.float32(1e-6),
    "a.u32": np.uint32(4_000_000_000),
}


def _data(tensor: Planned) -> np.ndarray:
    return np.random.default_rng(len(tensor.name)).integers(0, 256, tensor.nbytes, dtype=np.uint8)


def _nothing(_: Path) -> None:
    pass


def _write(path: Path, check: Callable[[Path], None] = _nothing, force: bool = False, tensors: tuple[Planned, ...] = TENSORS) -> None:
    with writing(path, METADATA, tensors, check, force) as sink:
        for tensor in tensors:
            for piece in np.array_split(_data(tensor), 3):
                sink.write(tensor.name, piece)


def test_the_gguf_package_reads_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    _write(path)
    reader = GGUFReader(path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert list(found) == [tensor.name for tensor in TENSORS]
    for tensor in TENSORS:
        assert tuple(found[tensor.name].shape.tolist()) == tensor.shape[::-1]
        assert np.array_equal(found[tensor.name].data.view(np.uint8).reshape(-1), _data(tensor))
    assert reader.fields["a.u64"].contents() == [2**63 + 1, 23703573157769]
    assert reader.fields["a.i32"].contents() == [-1, 0, 7]
    assert reader.fields["a.words"].contents() == ["", "ü", "日本"]
    assert reader.fields["a.bools"].contents() == [True, False, True]
    assert reader.fields["a.flag"].contents() is True
    assert reader.fields["a.u32"].contents() == 4_000_000_000
    assert np.float32(reader.fields["a.f32"].contents()) == np.float32(1e-6)


def test_our_reader_agrees_and_the_size_was_known_before(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    _write(path)
    opened = open_gguf(path)
    assert path.stat().st_size == total_bytes(METADATA, TENSORS)
    assert list(tmp_path.iterdir()) == [path]
    for tensor in TENSORS:
        assert opened.tensors[tensor.name].shape == tensor.shape
        assert np.array_equal(opened.raw(tensor.name).reshape(-1), _data(tensor))


def test_without_nameless_files_it_works_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_writer, "_nameless", lambda _: None)
    _write(tmp_path / "x.gguf")
    assert np.array_equal(open_gguf(tmp_path / "x.gguf").raw("q").reshape(-1), _data(TENSORS[2]))
    with pytest.raises(RuntimeError), writing(tmp_path / "y.gguf", METADATA, TENSORS, _nothing):
        raise RuntimeError
    assert [each.name for each in tmp_path.iterdir()] == ["x.gguf"]


def test_an_existing_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"old")
    with pytest.raises(LabError, match=r"exists; choose another name or say --force"):
        _write(path)

    def refused(aside: Path) -> None:
        assert aside != path and open_gguf(aside).tensors
        raise LabError("not good")

    with pytest.raises(LabError, match="not good"):
        _write(path, refused, force=True)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    _write(path, force=True)
    assert path.read_bytes()[:4] == b"GGUF" and list(tmp_path.iterdir()) == [path]


def test_of_two_files_of_one_name_the_second_is_refused_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"

    def meanwhile(aside: Path) -> None:
        path.write_bytes(b"another")

    with pytest.raises(LabError, match=r"x\.gguf exists; choose another name or say --force"):
        _write(path, meanwhile)
    assert path.read_bytes() == b"another" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("fault", ["missing", "order", "too much", "interrupt"])
def test_a_write_that_is_not_the_plan_leaves_nothing(tmp_path: Path, fault: str) -> None:
    with pytest.raises((ValueError, KeyboardInterrupt)), writing(tmp_path / "x.gguf", METADATA, TENSORS, _nothing) as sink:
        if fault == "order":
            sink.write("one", _data(TENSORS[1]))
        sink.write("odd", _data(TENSORS[0]))
        if fault == "too much":
            sink.write("one", np.zeros(5, dtype=np.uint8))
        if fault == "interrupt":
            raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (total_bytes(METADATA, TENSORS) - 100, before[1]))  # as a quota does
    try:
        with pytest.raises(LabError) as caught:
            _write(tmp_path / "x.gguf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "x.gguf: cannot be written" in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    huge = Planned("huge", (1 << 30, 1 << 20), TYPES["F32"])
    with pytest.raises(LabError, match=r"needs \d+ bytes, .* has \d+ free"), writing(tmp_path / "x.gguf", METADATA, [huge], _nothing):
        pytest.fail("the block must not begin")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_missing_is_made_and_goes_again_where_the_file_fails(tmp_path: Path) -> None:
    def refused(aside: Path) -> None:
        raise LabError("not good")

    with pytest.raises(LabError, match="not good"):
        _write(tmp_path / "none" / "deeper" / "x.gguf", refused)
    assert not list(tmp_path.iterdir())
    _write(tmp_path / "none" / "deeper" / "x.gguf")
    assert [each.name for each in (tmp_path / "none" / "deeper").iterdir()] == ["x.gguf"]
    with pytest.raises(LabError, match=r"y\.gguf: .*x\.gguf is no folder; choose another name"):
        _write(tmp_path / "none" / "deeper" / "x.gguf" / "y.gguf")


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    nameless = gguf_writer._nameless(tmp_path)
    if nameless is None:
        pytest.skip("this file system has no files without a name")
    os.close(nameless)
    code = """
        import sys, time
        from pathlib import Path
        import numpy as np
        from lab.artifacts.gguf_writer import Planned, writing
        from lab.codecs.gguf_types import TYPES
        with writing(Path(sys.argv[1]), {"general.architecture": "x"}, [Planned("a", (1 << 16, 64), TYPES["F32"])], lambda _: None) as sink:
            sink.write("a", np.zeros(1 << 20, dtype=np.uint8))
            print("writing", flush=True)
            time.sleep(60)
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "x.gguf")], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"writing\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert not list(tmp_path.iterdir())


def test_what_the_format_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match=r"q \[4, 33\] cannot be Q8_0"):
        header({}, [Planned("q", (4, 33), TYPES["Q8_0"])])
    with pytest.raises(ValueError, match=r"k: complex128"):
        header({"k": np.array([1j])}, [])
