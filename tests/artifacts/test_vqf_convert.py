"""What the conversion says and refuses: numbers of the header, tensors against it, commands that work, and what lies beside source and result."""

from __future__ import annotations

import json
import shlex
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.artifacts.vqf import VqfArtifact
from lab.artifacts.vqf_arch import MAX_SEQ_LEN, arch_of_config, arch_of_fields, fields_of_arch
from lab.artifacts.vqf_convert import run
from lab.artifacts.vqf_file import VqfFile
from lab.artifacts.vqf_flags import LayoutRefusedError
from lab.convert import convert_command
from lab.errors import LabError
from lab.models.transformer.config import from_dict
from tests.artifacts.test_vqf_plan import geometry
from tests.artifacts.test_vqf_relayout import with_vision
from tests.artifacts.test_vqf_writer import arguments, dense, mixture, saved
from tests.artifacts.vqf_files import DIM, LAYERS, Spec, dual, one_thread, put_beside, q4, random_weights, spec  # noqa: F401

ROPE = {"rope_type": "default", "mrope_section": [24, 20, 20]}


@pytest.mark.parametrize(("said", "written"), [(4096, 4096), (40960, MAX_SEQ_LEN)])
def test_the_context_is_the_models_own_up_to_the_converters_limit(tmp_path: Path, said: int, written: int) -> None:
    saved(dense(max_position_embeddings=said), tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "a", arguments(wmode="q8"))
    run(tmp_path / "a", tmp_path / "b", arguments(wmode="q4"))  # from VQF, encoded again
    convert_command([str(tmp_path / "a"), str(tmp_path / "c"), "--to", "safetensors"])
    for folder in "ab":
        assert VqfFile(tmp_path / folder / "model.vqf").header.arch.max_seq_len == written
    for folder in "abc":
        assert json.loads((tmp_path / folder / "config.json").read_text())["max_position_embeddings"] == written


def test_multimodal_rope_gets_into_the_header_and_through_it() -> None:
    text = {**geometry("qwen3_2b"), "model_type": "qwen3_vl_text", "rope_scaling": ROPE, "bos_token_id": 7}
    whole = {"model_type": "qwen3_vl", "text_config": text}
    arch = arch_of_fields(whole)
    assert (arch.has_mrope, arch.mrope_n_sec, arch.mrope_sections, arch.bos_id) == (1, 3, (24, 20, 20, 0), 7)
    assert arch_of_config(from_dict(whole), whole) == arch
    assert arch_of_fields(fields_of_arch(Path("m.vqf"), arch, None)) == arch
    plain = arch_of_fields(geometry("qwen3_2b"))
    assert (plain.has_mrope, plain.mrope_sections) == (0, (0, 0, 0, 0)) and arch_of_fields(fields_of_arch(Path("m.vqf"), plain, None)) == plain


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bos_token_id": 1 << 32}, "field bos_token_id: 4294967296 must be at most 4294967295"),
        ({"bos_token_id": -1}, "field bos_token_id: -1 must be at least 0"),
        ({"rope_theta": 1e300}, r"field rope_theta: 1e\+300 does not fit the 32-bit float"),
        ({"rms_norm_eps": 1e-60}, "field rms_norm_eps: 1e-60 does not fit the 32-bit float"),
        ({"max_position_embeddings": 0}, "field max_position_embeddings: 0 must be at least 1"),
        ({"model_type": "llama"}, "no q_norm and k_norm"),
    ],
)
def test_numbers_that_no_header_holds_are_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LabError, match=f"c.json: .*{message}|c.json: {message}"):
        arch_of_fields({**geometry("qwen3_2b"), **changes}, "c.json")


X8 = ("x8_q", 4, 1, 1, b"\xaa" * (LAYERS * 128 * DIM // 32 * 18))
TOWER = with_vision(q4())


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (replace(q4(), words={**q4().words, 64: 0}), "tensor 'q_norm' is in the file, but header field has_q_norm is 0"),
        (replace(q4(), tensors=[*q4().tensors, ("moe_router", 1, 1, 1, bytes(4))]), "tensor 'moe_router' is in the file, but flag MOE is clear"),
        (replace(q4(), flags=0x63), "flag VISION is set with header field has_vision 0"),
        (replace(TOWER, flags=0x23), "tensor 'v_q8_qkv' is in the file, but flag VISION is clear"),
        (TOWER.without("v_norm2_b"), "1 tensor is missing, first v_norm2_b"),
        (replace(q4(), tensors=[*q4().tensors, X8]), "tensor 'x8_q' is in the file, but flag X8 is clear"),
        (replace(q4(), flags=0x27), "flag X8 is set, but no x8_ tensor is in the file"),
    ],
)
def test_tensors_that_contradict_the_header_are_refused(tmp_path: Path, base: Spec, message: str) -> None:
    path = base.write(tmp_path / "m.vqf")
    with pytest.raises(LabError, match=rf"m\.vqf: {message}"):
        run(path, tmp_path / "new.vqf", arguments(layout="0x3"))
    assert not (tmp_path / "new.vqf").exists()


def test_a_header_without_a_tower_is_the_converters_own(tmp_path: Path) -> None:
    """It fails at the tower with a warning only, and writes the text model: has_vision set, flag and tensors absent."""
    base = with_vision(q4())
    text = replace(base, flags=0x23, tensors=[t for t in base.tensors if not t[0].startswith("v_")])
    assert VqfFile(text.write(tmp_path / "m.vqf")).header.arch.has_vision == 1


def test_what_is_left_out_is_never_called_lossless(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = q4(flags=0x27)
    replace(base, tensors=[*base.tensors, X8, ("zz", 1, 1, 1, b"1234")]).write(tmp_path / "m.vqf")
    run(tmp_path / "m.vqf", tmp_path / "new.vqf", arguments())
    said = capsys.readouterr().out
    assert "lossless" not in said and "left out: x8_q, zz" in said
    run(tmp_path / "new.vqf", tmp_path / "again.vqf", arguments())
    assert "no tensor had to move; lossless" in capsys.readouterr().out


REFUSED = [
    (spec(random_weights(), [("q8", "Q8_0", ""), ("q4", "Q4_0", "")], flags=0x20), " --q8-layout rows"),
    (spec(random_weights(), [("q8", "Q8_0", "4X4")], flags=0x22), " --q8-layout 4x4"),
    (spec(random_weights(), [("q4", "Q4_0", "")], flags=0x20), ""),
    (spec(random_weights(), [("q8", "Q8_0", "8X8")], flags=0x33), ""),
    (spec(random_weights(), [("q8", "Q4I", "")], flags=0x28), ""),
]


@pytest.mark.parametrize(("base", "more"), REFUSED, ids=[f"{base.flags:#x}{more}" for base, more in REFUSED])
def test_the_command_of_a_refusal_works(tmp_path: Path, base: Spec, more: str) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    path = base.write(folder / "m.vqf")
    put_beside(folder)
    with pytest.raises(LayoutRefusedError, match="nothing relaxes this check") as caught:
        VqfArtifact(path)
    command = str(caught.value).rpartition(": ")[2]
    assert command.startswith("python -m lab convert ") and command.endswith(more) and ("g256" in str(caught.value)) is bool(base.flags & 0x10)
    words = [str(tmp_path / "OUT") if word == "OUT" else word for word in shlex.split(command)[4:]]
    assert convert_command(words) == 0
    assert VqfArtifact(tmp_path / "OUT").inspect()["checksum"] == "right"


@pytest.mark.parametrize(
    ("base", "why"),
    [
        (spec(random_weights(vocab=84), [("q8", "Q8_0", "")], flags=0x22), "vocab_size 84 is no multiple of 8"),
        (spec(random_weights(vocab=82), [("q4", "Q4_0", "")], flags=0x21), "vocab_size 82 is no multiple of 4"),
        (spec(random_weights(), [("q8", "Q8_0", "8X8")], flags=0x22), "8-bit blocks look like vqf:Q8_0_8X8: the flags are wrong"),
        (spec(random_weights(), [("q8", "Q8_0", "")], flags=0x32), "8-bit blocks do not tell rows from 4x4 tiles; convert it to --layout 0x3 with the"),
    ],
)
def test_a_refusal_without_a_way_out_names_no_command(tmp_path: Path, base: Spec, why: str) -> None:
    with pytest.raises(LayoutRefusedError, match=why) as caught:
        VqfArtifact(base.write(tmp_path / "m.vqf"))
    assert "python -m lab" not in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_broken_small_files_beside_the_source_are_one_line(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    dual().write(old / "m.vqf")
    for name, content, message in (
        ("tokenizer.json", b'{"a": "\xff"}', r"tokenizer\.json: not a tokenizer"),
        ("config.json", b"[" * 100_000, r"config\.json: not valid JSON"),
        ("config.json", b'{"hidden_size": ' + b"9" * 5000 + b"}", r"config\.json: not valid JSON"),
        ("config.json", b'{"hidden_size": 512}', r"the header has hidden_size 96, config\.json beside it 512; they do not belong together"),
        ("config.json", b'{"intermediate_size": 512}', r"the header has intermediate_size 160, config\.json beside it 512"),
        ("config.json", b'{"rope_theta": 1e6}', r"the header has rope_theta 5000000\.0, config\.json beside it 1000000\.0"),
    ):
        put_beside(old)
        (old / name).write_bytes(content)
        for words in ({}, {"wmode": "q4"}):
            with pytest.raises(LabError, match=message):
                run(old / "m.vqf", tmp_path / "new", arguments(**words))
        (old / name).unlink()
    put_beside(old, 2)
    with pytest.raises(LabError, match="the header's eos_id 2 is no token"):
        run(old / "m.vqf", tmp_path / "new", arguments())
    assert not (tmp_path / "new").exists()
    saved(dense(), tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_bytes(b"[" * 100_000)
    with pytest.raises(LabError, match=r"hf/config\.json: not valid JSON"):
        run(tmp_path / "hf", tmp_path / "new", arguments())


def test_what_the_result_lacks_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dual().write(tmp_path / "m.vqf")
    run(tmp_path / "m.vqf", tmp_path / "new", arguments())
    said = capsys.readouterr().out
    assert "warning: no tokenizer.json beside either file: the lab cannot run it" in said and "warning: no config.json" in said and "vocab.bin" in said
    put_beside(tmp_path, config=json.dumps({"model_type": "qwen3"}))
    run(tmp_path / "m.vqf", tmp_path / "newer", arguments())
    assert "warning" not in capsys.readouterr().out and VqfArtifact(tmp_path / "newer").inspect()["checksum"] == "right"


@pytest.mark.parametrize(("sets", "flags", "wmode"), [(("q8", "Q4I", ""), 0x2A, "q4i"), (("q8", "Q8_0", "8X8"), 0x33, "g256")])
def test_a_mode_that_is_given_up_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], sets: Any, flags: int, wmode: str) -> None:
    spec(random_weights(), [sets], flags=flags).write(tmp_path / "m.vqf")
    run(tmp_path / "m.vqf", tmp_path / "new.vqf", arguments())
    assert f"the file is no longer {wmode}: the same codes and scales are now marked as plain Q8_0" in capsys.readouterr().out
    if wmode == "g256":  # rows of 96 are no groups of 256: only the frames can be kept
        return
    run(tmp_path / "m.vqf", tmp_path / "kept.vqf", arguments(layout=hex(flags & 0x1F)))
    assert "no longer" not in capsys.readouterr().out and struct.unpack_from("<I", (tmp_path / "kept.vqf").read_bytes(), 8)[0] == flags


def test_an_option_that_does_nothing_is_refused(tmp_path: Path) -> None:
    q4().write(tmp_path / "m.vqf")
    for words in ({}, {"layout": "0x1"}, {"wmode": "q8"}):
        with pytest.raises(LabError, match="--q8-layout rows: "):
            run(tmp_path / "m.vqf", tmp_path / "new.vqf", arguments(q8_layout="rows", **words))


def test_what_is_no_source_or_does_not_fit_is_named(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8}
    saved(mixture(**sizes), tmp_path / "hf")
    message = r"hf: q8_down of an expert \[256, 64\]: moe_intermediate_size 64 is no multiple of the 256 weights of vqf:G256_8X8; choose another --wmode"
    with pytest.raises(LabError, match=message):
        run(tmp_path / "hf", tmp_path / "new", arguments(wmode="g256"))
    with pytest.raises(LabError, match=r"model\.safetensors: neither a \.vqf nor a \.gguf file; of a safetensors model name the folder"):
        run(tmp_path / "hf" / "model.safetensors", tmp_path / "new.vqf", arguments())


def test_g256_says_that_the_lab_does_not_run_it_and_a_long_name_stays_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(dense(hidden_size=256, num_attention_heads=8, num_key_value_heads=8, intermediate_size=256), tmp_path / "hf")
    target = tmp_path / ("long " * 30) / "g.vqf"
    run(tmp_path / "hf", target, arguments(wmode="g256"))
    lines = capsys.readouterr().out.splitlines()
    assert f"{target}  {target.stat().st_size} bytes  flags 0x33, layout 0x13 (Q8_8X8 | Q4_4X4 | G256)" in lines
    (told,) = [line for line in lines if line.startswith("the lab's engine runs with wmode dual and refuses g256")]
    words = [str(tmp_path / "OUT") if word == "OUT" else word for word in shlex.split(told.partition("lab convert ")[2])]
    assert convert_command(words) == 0 and VqfArtifact(tmp_path / "OUT").inspect()["layers"] == 2
