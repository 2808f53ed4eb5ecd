"""Right GGUF files are read right: typed metadata, shapes, bytes where they lie, split and merged alike.

Why bytes are compared with what was written and not with another reader's answer: the merged-file fault was a reader that agreed with itself.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lab.artifacts.gguf import Gguf, open_gguf
from lab.artifacts.gguf_file import GgufFile
from lab.codecs.gguf import PART, parts_of
from lab.codecs.gguf_types import TYPES
from lab.errors import LabError
from tests.artifacts.gguf_files import TABLE, Spec, Tensor, kv, model, split, write_split


def _assert_holds(gguf: Gguf, tensors: list[Tensor]) -> None:
    assert set(gguf.tensors) == {tensor.name for tensor in tensors}
    for tensor in tensors:
        found, raw = gguf.tensors[tensor.name], gguf.raw(tensor.name)
        assert (found.shape, found.type.name, found.nbytes) == (tuple(tensor.shape), tensor.type, len(tensor.data))
        assert raw.tobytes() == tensor.data and raw.dtype == np.uint8
        assert raw.shape == (*tensor.shape[:-1], found.type.row_bytes(tensor.shape[-1]))
        assert found.path.read_bytes()[found.offset : found.offset + found.nbytes] == tensor.data


def test_metadata_keeps_its_types(tmp_path: Path) -> None:
    values = [
        kv("general.architecture", "str", "qwen4exp"),
        kv("a.u8", "u8", 255),
        kv("a.i32", "i32", -7),
        kv("a.u64", "u64", 2**64 - 1),
        kv("a.f32", "f32", 0.5),
        kv("a.bool", "bool", True),
        kv("a.words", "[str]", ["a", "", "ключ", "\n"]),
        kv("a.numbers", "[u64]", [2**63, 1]),
        kv("a.flags", "[bool]", [True, False]),
        kv("a.empty", "[str]", []),
    ]
    found = GgufFile(Spec(model(), values).write(tmp_path / "m.gguf")).metadata
    plain = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in found.items()}
    expected = ["qwen4exp", 255, -7, 2**64 - 1, 0.5, True, ["a", "", "ключ", "\n"], [2**63, 1], [True, False], []]
    assert list(plain.values()) == expected
    assert [type(value) for value in plain.values()] == [type(value) for value in expected]


def test_one_file(tmp_path: Path) -> None:
    _assert_holds(open_gguf(Spec(model()).write(tmp_path / "m.gguf")), model())


def test_the_order_of_the_table_need_not_be_the_order_of_the_data(tmp_path: Path) -> None:
    first, second = Tensor("a", "F32", (8,), offset=64), Tensor("bc", "F16", (32,), offset=0)
    spec = Spec([first, second])
    (tmp_path / "m.gguf").write_bytes(spec.header() + second.data + first.data)
    gguf = open_gguf(tmp_path / "m.gguf")
    assert list(gguf.tensors) == ["a", "bc"]
    assert (gguf.raw("a").tobytes(), gguf.raw("bc").tobytes()) == (first.data, second.data)


def test_alignment_is_honoured_and_the_last_tensor_may_lack_its_padding(tmp_path: Path) -> None:
    tensors = [Tensor("odd", "F16", (3,)), Tensor("more", "F32", (5,)), Tensor("last", "I8", (7,))]
    spec = Spec(tensors, [kv("general.alignment", "u32", 128)], alignment=128)
    _assert_holds(open_gguf(spec.write(tmp_path / "m.gguf")), tensors)
    (tmp_path / "cut.gguf").write_bytes(spec.content()[: -(128 - 7)])
    _assert_holds(open_gguf(tmp_path / "cut.gguf"), tensors)


def test_a_header_alone_is_a_file(tmp_path: Path) -> None:
    assert open_gguf(Spec([]).write(tmp_path / "m.gguf")).tensors == {}


def test_nothing_is_copied_and_nothing_can_be_written(tmp_path: Path) -> None:
    gguf = open_gguf(Spec(model()).write(tmp_path / "m.gguf"))
    raw = gguf.raw(TABLE.name)
    assert np.shares_memory(raw, gguf.raw(TABLE.name)) and parts_of(raw)[PART].data_ptr() == raw.ctypes.data
    with pytest.raises(ValueError, match="read-only"):
        raw[0, 0] = 1


def test_the_table_is_the_same_in_its_shard_and_in_a_merged_file(tmp_path: Path) -> None:
    """The fault seen in the wild: the table of a merged file was read at the offset that it has in its own shard."""
    rest = model()[:-1]
    shards = write_split(tmp_path, split([rest, [TABLE]]))
    # Merged with the table in the middle; llama-gguf-split --merge leaves split.count = 0.
    merged = Spec([rest[0], TABLE, *rest[1:]], [kv("general.architecture", "str", "qwen4exp"), kv("split.count", "u16", 0)]).write(tmp_path / "merged.gguf")
    apart, together = open_gguf(shards[0]), open_gguf(merged)
    _assert_holds(apart, model())
    _assert_holds(together, model())
    lone, inside = apart.tensors[TABLE.name], together.tensors[TABLE.name]
    assert lone.path == shards[1] and lone.offset == apart.files[1].data_start == 192  # as published: one tensor after 192 bytes
    assert inside.path == merged and inside.offset > together.files[0].data_start
    assert merged.read_bytes()[lone.offset : lone.offset + lone.nbytes] != TABLE.data


@pytest.mark.parametrize("shard", [0, 1, 2])
def test_any_shard_opens_the_whole_split(tmp_path: Path, shard: int) -> None:
    tensors = model()
    paths = write_split(tmp_path, split([tensors[:2], tensors[2:4], [TABLE]]))
    gguf = open_gguf(paths[shard])
    _assert_holds(gguf, tensors)
    assert gguf.metadata["general.architecture"] == "qwen4exp"


def test_files_without_split_numbers_are_joined_when_all_are_named(tmp_path: Path) -> None:
    tensors = model()
    paths = [Spec(part).write(tmp_path / f"{name}.gguf") for name, part in (("trunk", tensors[:2]), ("experts", tensors[2:4]), ("table", [TABLE]))]
    _assert_holds(open_gguf(*paths), tensors)
    with pytest.raises(LabError, match="trunk.gguf: no tensor 'per_layer"):
        open_gguf(paths[0]).raw(TABLE.name)


def test_offsets_beyond_32_bits(tmp_path: Path) -> None:
    """A sparse file of 5 GiB whose last tensor begins above 4 GiB."""
    big, last = 5 << 30, Tensor("last", "Q8_0", (2, 32), offset=5 << 30)
    spec = Spec([Tensor("big", "I8", (big,), data=b"-"), last])
    with (tmp_path / "m.gguf").open("wb") as handle:
        header = spec.header()
        handle.write(header)
        handle.seek(len(header) + big)
        handle.write(last.data)
    gguf = open_gguf(tmp_path / "m.gguf")
    assert gguf.tensors["last"].offset == len(header) + big
    assert gguf.raw("last").tobytes() == last.data


@pytest.mark.parametrize("type_name", ["Q2_0", "Q2_0_G128"])
def test_id_42_is_decided_by_bytes(tmp_path: Path, type_name: str) -> None:
    """The small tensor alone fits both readings; the other one decides for the file."""
    tensors = [Tensor("small", type_name, (1, 128)), Tensor("large", type_name, (64, 640)), Tensor("norm", "F32", (16,))]
    _assert_holds(open_gguf(Spec(tensors).write(tmp_path / "m.gguf")), tensors)
    _assert_holds(open_gguf(Spec(tensors[::-1]).write(tmp_path / "last.gguf")), tensors)


def test_the_gguf_package_reads_and_writes_the_same(tmp_path: Path) -> None:
    package = pytest.importorskip("gguf")
    writer = package.GGUFWriter(tmp_path / "theirs.gguf", "qwen4exp")
    writer.add_uint64("x.size", 2**40)
    writer.add_array("x.words", ["a", "b"])
    weights = np.random.default_rng(0).normal(size=(3, 4, 64)).astype(np.float32)
    writer.add_tensor("plain", weights)
    writer.add_tensor("packed", package.quants.quantize(weights, package.GGMLQuantizationType.Q4_1), raw_dtype=package.GGMLQuantizationType.Q4_1)
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    ours = open_gguf(tmp_path / "theirs.gguf")
    assert ours.metadata["x.size"] == 2**40 and ours.metadata["x.words"] == ["a", "b"]

    ours_written = Spec([tensor for tensor in model() if tensor.type != "Q2_0"]).write(tmp_path / "ours.gguf")
    for path in (tmp_path / "theirs.gguf", ours_written):
        gguf = open_gguf(path)
        theirs = package.GGUFReader(path).tensors
        assert {tensor.name for tensor in theirs} == set(gguf.tensors)
        for tensor in theirs:
            mine = gguf.tensors[tensor.name]
            assert (mine.offset, mine.nbytes, mine.type.name) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type.name)
            assert list(mine.shape) == tensor.shape.tolist()[::-1]
            assert gguf.raw(tensor.name).tobytes() == tensor.data.tobytes()


def test_the_table_of_types_agrees_with_the_gguf_package() -> None:
    package = pytest.importorskip("gguf")
    theirs = {kind.name: (int(kind), *package.GGML_QUANT_SIZES[kind]) for kind in package.GGMLQuantizationType}
    ours = {name: (kind.id, kind.block, kind.nbytes) for name, kind in TYPES.items()}
    shared = ours.keys() & theirs.keys()
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}
    assert theirs.keys() - shared == {"Q8_1", "Q8_K"}  # of activations, in no file
    assert ours.keys() - shared <= {"Q1_0", "Q2_0", "Q2_0_G128"}  # newer than a package may be
