"""Headers written by hand at the offsets of the notes: both forms read, every lie refused in one line, the flag words and the layout gate."""

from __future__ import annotations

import pickle
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from lab.artifacts.vqf_file import VqfFile
from lab.artifacts.vqf_flags import Engine, LayoutRefusedError, check_layout, parse_layout
from lab.artifacts.vqf_header import HEADER_BYTES, read_header
from lab.artifacts.vqf_plan import flags_of
from lab.errors import LabError
from tests.artifacts.vqf_files import DIM, EXPERTS, FF, HEADS, KV, LAYERS, VOCAB, WIDTH, dual, one_thread, q4, random_weights, spec  # noqa: F401


@pytest.mark.parametrize("legacy", [False, True])
def test_both_forms_are_read(tmp_path: Path, legacy: bool) -> None:
    words = {56: 11, 64: 1, 68: 1, 128: 3, 132: 5, 148: 24, 152: 20, 156: 20, 164: 101, 176: 104}
    file = VqfFile(q4(legacy=legacy, words=words).write(tmp_path / "m.vqf"))
    arch = file.header.arch
    assert file.header.legacy is legacy
    assert (arch.dim, arch.n_layers, arch.n_heads, arch.n_kv_heads, arch.ffn_dim, arch.vocab_size) == (DIM, LAYERS, HEADS, KV, FF, VOCAB)
    assert (arch.max_seq_len, arch.rope_theta, arch.bos_id, arch.eos_id, arch.has_mrope, arch.mrope_n_sec) == (8192, 5e6, 11, 2, 1, 3)
    assert arch.mrope_sections == (24, 20, 20, 0) and arch.vis_ds_idx == (5, 0, 0, 0) and arch.vision_start_id == 101 and arch.video_token_id == 104
    assert abs(arch.norm_eps - 1e-6) < 1e-12 and arch.n_experts == 0
    assert file.check_sum() and file.size == (tmp_path / "m.vqf").stat().st_size


def test_a_mixture_is_read(tmp_path: Path) -> None:
    file = VqfFile(spec(random_weights(mixture=True), [("q4", "Q4_0", "4X4")], mixture=True).write(tmp_path / "m.vqf"))
    arch = file.header.arch
    assert (arch.n_experts, arch.moe_ffn, arch.top_k, arch.shared_experts, file.header.version) == (EXPERTS, WIDTH, 2, 0, 3)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_header_is_written_in_the_newer_form_and_read_back(tmp_path: Path, legacy: bool) -> None:
    content = q4(legacy=legacy, words={132: 0xFFFFFFFF, 188: 0}).content()
    header = read_header(tmp_path / "m", content[:HEADER_BYTES], len(content))
    again = header.packed()
    assert len(again) == HEADER_BYTES and header.arch.vis_ds_idx[0] == -1
    assert read_header(tmp_path / "m", again, len(content)) == replace(header, legacy=False)
    if not legacy:
        assert again == content[:HEADER_BYTES]


def changed(content: bytes, at: int, form: str, *values: float) -> bytes:
    new = struct.pack("<" + form, *values)
    return content[:at] + new + content[at + len(new) :]


MIXTURE = spec(random_weights(mixture=True), [("q4", "Q4_0", "4X4")], mixture=True).content()
PLAIN = q4().content()

REFUSED = [
    (changed(PLAIN, 0, "I", 0x57465156), r"not a VQF file: it begins with b'VQFW', not b'FQFW'"),
    (changed(PLAIN, 4, "I", 1), "VQF version 1 is not read, only 2"),
    (changed(PLAIN, 8, "I", 0xA3), "the file is encrypted, which the lab does not read"),
    (changed(PLAIN, 8, "I", 0x123), "the file is signed, which the lab does not read"),
    (changed(PLAIN, 8, "I", 0x423), "flags 0x423 have unknown bits 0x400"),
    (changed(PLAIN, 8, "I", 0x29), r"flags 0x29 set Q8_8X8 \| Q8BUF_Q4 together"),
    (changed(PLAIN, 12, "I", 0), "counts 0 tensors; expected 1 to 1024"),
    (changed(PLAIN, 12, "I", 0xFFFFFFFF), "counts 4294967295 tensors"),
    (changed(PLAIN, 16, "I", 0), "header field dim is 0"),
    (changed(PLAIN, 20, "I", 0xFFFFFFFF), "header field n_layers is 4294967295"),
    (changed(PLAIN, 28, "I", 3), "n_kv_heads is 3, which does not divide n_heads 4"),
    (changed(PLAIN, 48, "f", float("nan")), "header field rope_theta is nan"),
    (changed(PLAIN, 52, "f", 0.0), "header field norm_eps is 0.0"),
    (changed(PLAIN, 200, "Q", 4097), "header layout undetermined: neither form"),
    (changed(PLAIN, 200, "Q", 64), "header layout undetermined: neither form"),
    (changed(PLAIN, 208, "Q", 2**64 - 64), "bytes are missing; truncated"),
    (changed(PLAIN, 184, "2Q", *struct.unpack_from("<2Q", PLAIN, 200)), "header layout undetermined: both forms"),
    (PLAIN[:-1], r"the header says \d+ bytes, the file has \d+: 1 byte is missing; truncated"),
    (PLAIN[: len(PLAIN) // 2], "bytes are missing; truncated"),
    (PLAIN + b"\0" * 24, "24 bytes too many"),
    (PLAIN[:511], "511 bytes are fewer than a header and one tensor"),
    (b"", "empty file"),
    (changed(PLAIN, 4, "I", 3), "version 3 with the MOE flag clear: they contradict"),
    (changed(PLAIN, 8, "I", 0x223), "version 2 with the MOE flag set: they contradict"),
    (changed(PLAIN, 180, "I", 2), "n_experts is 2 with the MOE flag clear"),
    (changed(MIXTURE, 184, "I", 31), "5 experts of width 31, 2 chosen, and ffn_dim 160"),
    (changed(MIXTURE, 188, "I", 6), "6 chosen"),
    (changed(MIXTURE, 192, "I", 1), "shared_experts is 1"),
    (spec(random_weights(mixture=True), [("q4", "Q4_0", "4X4")], mixture=True, legacy=True).content(), "MOE flag set in the older header"),
]


@pytest.mark.parametrize(("content", "message"), REFUSED, ids=[m[:40] for _, m in REFUSED])
def test_lies_are_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.vqf"
    path.write_bytes(content)
    with pytest.raises(LabError, match=message) as caught:
        VqfFile(path)
    assert str(caught.value).startswith(f"{path}: ") and len(str(caught.value).splitlines()) == 1


def test_a_missing_file_and_a_folder_are_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "none.vqf", tmp_path):
        with pytest.raises(LabError, match="cannot be read"):
            VqfFile(path)


def test_the_flag_words_of_the_notes() -> None:
    assert [flags_of(w, vision=True) for w in ("dual", "q4", "q8", "q4i", "g256")] == [0x63, 0x63, 0x63, 0x6A, 0x73]
    assert flags_of("q4", mixture=True) == 0x223
    assert flags_of("dual", 0x1) == 0x21 and flags_of("g256", 0x12) == 0x32 and flags_of("q4i", 0x8) == 0x28
    for wmode, word in (("q4", 0x7), ("q8", 0x13), ("q4i", 0xB), ("g256", 0x3), ("q4i", 0x3)):
        with pytest.raises(LabError, match=f"--layout {word:#x}: not possible with --wmode {wmode}"):
            flags_of(wmode, word)
    with pytest.raises(LabError, match="--wmode q2mix: unknown; choose from: dual"):
        flags_of("q2mix")


def test_the_gate_lets_only_the_engines_layout_through() -> None:
    path = Path("m.vqf")
    check_layout(path, 0x63, Engine())
    check_layout(path, 0x6A, Engine())  # a q4i file switches the engine's own tiling off
    check_layout(path, 0x73, Engine(wmode="g256"))
    check_layout(path, 0x62, Engine(q8_8x8=False))
    check_layout(path, 0x21, Engine(q4_4x4=False))
    for flags, engine in ((0x61, Engine()), (0x62, Engine()), (0x73, Engine()), (0x63, Engine(wmode="g256")), (0x60, Engine())):
        with pytest.raises(LayoutRefusedError):
            check_layout(path, flags, engine)


@pytest.mark.parametrize("engine", [Engine(), Engine(wmode="g256"), Engine(q8_8x8=False), Engine(q8_8x8=False, q4_4x4=False)])
def test_x8_copies_load_nowhere(engine: Engine) -> None:
    """Bit 2 is in the loader's mask, and its engine never sets it."""
    for rest in (0x0, 0x1, 0x2, 0x3, 0x8, 0xA, 0x13):
        with pytest.raises(LayoutRefusedError, match="X8"):
            check_layout(Path("m"), rest | 0x4, engine)


def test_the_refusal_names_words_and_command_and_explains_every_bit() -> None:
    with pytest.raises(LayoutRefusedError) as caught:
        check_layout(Path("Modl/model.vqf"), 0x61, Engine())
    error = caught.value
    assert (error.file_flags, error.engine_flags) == (0x1, 0x3)
    assert len(str(error).splitlines()) == 1 and "python -m lab convert Modl/model.vqf OUT --to vqf --layout 0x3" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.table() == error.table()
    table = error.table().splitlines()
    assert table[1:3] == ["file   0x01  Q8_8X8", "engine 0x03  Q8_8X8 | Q4_4X4"] and len(table) == 8
    assert [("DIFFERS" in line) for line in table[3:]] == [False, True, False, False, False]
    assert "bit 1  Q4_4X4" in table[4] and "the file says 4-bit matrices in rows; the engine expects 4-bit matrices in 4x4 tiles" in table[4]


def test_layout_words_of_a_command_line() -> None:
    assert [parse_layout(t) for t in ("0x3", "3", "0b11", "0x13")] == [3, 3, 3, 0x13]
    for text, message in (("three", "not a number"), ("0x20", "only bits 0 to 4"), ("-1", "only bits 0 to 4"), ("0x9", "never tiled")):
        with pytest.raises(LabError, match=message):
            parse_layout(text)


def test_a_dual_file_has_both_sets(tmp_path: Path) -> None:
    assert VqfFile(dual().write(tmp_path / "m.vqf")).sets == ("q8", "q4")
