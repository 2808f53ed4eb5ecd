"""A refused file laid out anew: 0x1 to 0x3 and back, every pair of layouts, a vision tower kept byte for byte, and what is refused instead of guessed."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.artifacts.vqf import VqfArtifact
from lab.artifacts.vqf_convert import add_arguments, run
from lab.artifacts.vqf_file import VqfFile
from lab.artifacts.vqf_flags import LayoutRefusedError
from lab.artifacts.vqf_relayout import relayout
from lab.artifacts.vqf_weights import VqfWeights
from lab.codecs.vqf import vqf_codec
from lab.errors import LabError
from tests.artifacts.vqf_files import DIM, LAYERS, VOCAB, Spec, dual, one_thread, put_beside, q4, random_weights, spec  # noqa: F401

BOTH = [("q8", "Q8_0", "8X8"), ("q4", "Q4_0", "")]


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def everything(file: VqfFile, use: str, q8_layout: str | None = None) -> list[Tensor]:
    weights = VqfWeights(file, use, q8_layout)
    names = ["lm_head.weight", *(f"layers.{i}.self_attn.{k}_proj.weight" for i in range(LAYERS) for k in "qkvo")]
    names += [] if weights.mixture else [f"layers.{i}.mlp.{k}_proj.weight" for i in range(LAYERS) for k in ("gate", "up", "down")]
    return [one.codec.decode(one.parts, one.shape[-1]) for name in names for one in weights.matrix(name)]


def test_the_8b_stages_file_loads_after_conversion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """File 0x1, engine 0x3: refused, converted by the command that the refusal names, loaded, the same weights."""
    old = tmp_path / "old" / "model.vqf"
    old.parent.mkdir()
    spec(random_weights(4), [("q4", "Q4_0", "")], flags=0x21).write(old)
    put_beside(old.parent, config=json.dumps({"model_type": "qwen3"}))
    with pytest.raises(LayoutRefusedError) as caught:
        VqfArtifact(old)
    command = str(caught.value).split("python -m lab convert ")[1].replace("OUT", str(tmp_path / "new"))
    source, target, *words = command.replace("--to vqf ", "").split()
    assert run(Path(source), Path(target), arguments(*words)) == 0
    out = capsys.readouterr().out
    assert "layout 0x1 -> 0x3" in out and "8 tensors laid out anew (q4_q, q4_k, q4_v, q4_o, q4_gate, q4_up, q4_down, q4_lm)" in out and "lossless" in out
    new = VqfArtifact(tmp_path / "new")
    assert new.inspect()["checksum"] == "right" and new.file.header.flags == 0x23
    for before, after in zip(everything(VqfFile(old), "q4"), everything(new.file, "q4"), strict=True):
        assert torch.equal(before, after)
    tiled = VqfFile(q4(4).write(tmp_path / "tiled.vqf"))
    assert all(new.file.raw(name).tobytes() == tiled.raw(name).tobytes() for name in new.file.entries)


@pytest.mark.parametrize(("start", "tiles"), [(0x3, ("8X8", "4X4")), (0x1, ("8X8", "")), (0x2, ("", "4X4")), (0x0, ("", "")), (0x2, ("4X4", "4X4"))])
@pytest.mark.parametrize("goal", [0x0, 0x1, 0x2, 0x3])
@pytest.mark.parametrize("mixture", [False, True])
def test_every_pair_of_layouts_keeps_every_weight(tmp_path: Path, start: int, tiles: tuple[str, str], goal: int, mixture: bool) -> None:
    sets = [("q8", "Q8_0", tiles[0]), ("q4", "Q4_0", tiles[1])]
    flags = start | (0x220 if mixture else 0x20)
    file = VqfFile(spec(random_weights(8, mixture), sets, mixture, flags=flags).write(tmp_path / "old.vqf"))
    told = None if start & 1 else {"": "rows", "4X4": "4x4"}[tiles[0]]
    done = relayout(file, tmp_path / "new.vqf", goal, told)
    new = VqfFile(done.path)
    assert new.check_sum() and new.header.flags & 0x1F == goal and new.size == done.nbytes == file.size and not done.dropped
    for use in ("q8", "q4"):
        for before, after in zip(
            everything(file, use, told if use == "q8" else None), everything(new, use, None if goal & 1 or use == "q4" else "rows"), strict=True
        ):
            assert torch.equal(before, after)
    assert ("q4_lm" in done.moved) is bool((goal ^ start) & 2) and ("q8_lm" in done.moved) is (tiles[0] != ("8X8" if goal & 1 else ""))


def test_a_way_there_and_back_gives_the_same_bytes(tmp_path: Path) -> None:
    file = VqfFile(dual(6).write(tmp_path / "a.vqf"))
    relayout(file, tmp_path / "b.vqf", 0x1)
    back = VqfFile(relayout(VqfFile(tmp_path / "b.vqf"), tmp_path / "c.vqf", 0x3).path)
    assert all(back.raw(name).tobytes() == file.raw(name).tobytes() for name in file.entries)


def with_vision(base: Spec) -> Spec:
    """One vision layer: hidden 32, ffn 40 (padded to 64), patch 2, temporal 1, merge 2, 9 positions, no deepstack."""
    generator = torch.Generator().manual_seed(1)
    eight = {"v_q8_qkv": 96 * 32, "v_q8_proj": 32 * 32, "v_q8_fc1": 40 * 32, "v_q8_fc2": 32 * 64}
    flat = {"v_patch_embed": 32 * 3 * 4, "v_patch_bias": 32, "v_pos_embed": 9 * 32, "v_qkv_bias": 96, "v_proj_bias": 32, "v_fc1_bias": 40}
    flat |= {"v_merger_f1w": 128 * 128, "v_merger_f1b": 128, "v_merger_f2w": 128 * 96, "v_merger_f2b": 96}
    flat |= {f"v_{name}": 32 for name in ("norm1_w", "norm1_b", "norm2_w", "norm2_b", "fc2_bias", "merger_nw", "merger_nb")}
    sizes = {**{n: (2, s // 32 * 34) for n, s in eight.items()}, **{n: (1, s * 4) for n, s in flat.items()}}
    tensors = [(n, q, 1, 1, torch.randint(256, (b,), dtype=torch.uint8, generator=generator).numpy().tobytes()) for n, (q, b) in sizes.items()]
    words = {80: 1, 84: 1, 88: 32, 92: 2, 96: 40, 100: 2, 104: 1, 108: 2, 112: 96, 116: 3, 120: 9}
    return replace(base, tensors=[*base.tensors, *tensors], flags=base.flags | 0x40, words={**base.words, **words})


@pytest.mark.parametrize("legacy", [False, True])
def test_a_vision_tower_and_all_numbers_of_the_header_are_kept(tmp_path: Path, legacy: bool) -> None:
    words = {68: 1, 128: 3, 148: 24, 152: 20, 156: 20, 164: 7, 56: 1}
    base = spec(random_weights(), [("q4", "Q4_0", "")], flags=0x21, words=words, legacy=legacy)
    file = VqfFile(with_vision(base).write(tmp_path / "old.vqf"))
    new = VqfFile(relayout(file, tmp_path / "new.vqf", 0x3).path)
    assert new.header.arch == file.header.arch and new.header.flags == 0x63 and not new.header.legacy
    for name in file.entries:
        if not name.startswith("q4_"):
            assert new.raw(name).tobytes() == file.raw(name).tobytes(), name
    put_beside(tmp_path)
    assert "the vision tower is not read" in VqfArtifact(tmp_path / "new.vqf").inspect()["notes"]


def test_x8_copies_and_unknown_tensors_are_left_out_and_said(tmp_path: Path) -> None:
    base = q4(flags=0x27)
    more = [("x8_q", 4, 1, 1, b"\xaa" * (LAYERS * 128 * DIM // 32 * 18)), ("zz", 1, 1, 1, b"1234")]
    done = relayout(VqfFile(replace(base, tensors=[*base.tensors, *more]).write(tmp_path / "old.vqf")), tmp_path / "new.vqf", 0x3)
    assert done.dropped == ("x8_q", "zz") and done.moved == () and (done.from_layout, done.to_layout) == (0x7, 0x3)
    put_beside(tmp_path)
    assert VqfArtifact(tmp_path / "new.vqf").inspect()["unknown"] == []


def test_q4i_and_g256_bits_can_be_given_up_without_loss(tmp_path: Path) -> None:
    """Both are valid Q8_0 frames with special codes or scales."""
    file = VqfFile(spec(random_weights(), [("q8", "Q4I", "")], flags=0x2A).write(tmp_path / "old.vqf"))
    new = VqfFile(relayout(file, tmp_path / "new.vqf", 0x3).path)
    for before, after in zip(everything(file, "q8"), everything(new, "q8"), strict=True):
        assert torch.equal(before, after)


def refused(tmp_path: Path, base: Spec | bytes, message: str, layout: int = 0x3, q8_layout: str | None = None) -> None:
    path = tmp_path / "old.vqf"
    path.write_bytes(base if isinstance(base, bytes) else base.content())
    with pytest.raises(LabError, match=message) as caught:
        relayout(VqfFile(path), tmp_path / "new.vqf", layout, q8_layout)
    assert len(str(caught.value).splitlines()) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["old.vqf"]


def test_what_cannot_be_moved_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    refused(tmp_path, q4(), "bit 2 .x8 copies. is set", 0x7)
    refused(tmp_path, dual(), "its matrices are not g256; --layout 0x13 needs requantising: say --wmode g256 too", 0x13)
    refused(tmp_path, dual(), "its matrices are not q4i; --layout 0xa needs requantising", 0xA)
    refused(tmp_path, spec(random_weights(), [("q8", "Q8_0", "")], flags=0x22), "ambiguous: flag bit 0 is clear")
    refused(tmp_path, spec(random_weights(), [("q8", "Q8_0", "")], flags=0x22), "all look like vqf:Q8_0; the flags are wrong", q8_layout="4x4")
    refused(tmp_path, spec(random_weights(), [("q4", "Q4_0", "4X4")], flags=0x21), "q4_q of layer 0 is said to be vqf:Q4_0, .* all look like vqf:Q4_0_4X4")
    refused(tmp_path, spec(random_weights(vocab=84), BOTH, flags=0x21), "vocab_size 84 is no multiple of 8")
    refused(tmp_path, spec(random_weights(vocab=84), BOTH, flags=0x21), "q8_lm: vocab_size 84 is no multiple of 8, so its converter left", 0x2)
    content = bytearray(dual().content())
    content[-100] ^= 1
    refused(tmp_path, bytes(content), "checksum")


def test_another_mode_is_encoded_again_and_says_what_was_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "old"
    old.mkdir()
    spec(random_weights(), [("q8", "Q4I", "")], flags=0x2A).write(old / "model.vqf")
    put_beside(old)
    run(old, tmp_path / "q4", arguments("--wmode", "q4"))
    line = next(line for line in capsys.readouterr().out.splitlines() if "vqf:Q4_0_4X4" in line)
    assert line.split()[-1] == "yes"  # the same codes in another frame
    file, new = VqfFile(old / "model.vqf"), VqfArtifact(tmp_path / "q4").file
    for before, after in zip(everything(file, "q8"), everything(new, "q4"), strict=True):
        assert torch.equal(before, after)
    dual(3).write(tmp_path / "d.vqf")
    put_beside(tmp_path)
    run(tmp_path / "d.vqf", tmp_path / "q4b", arguments("--wmode", "q4"))
    line = next(line for line in capsys.readouterr().out.splitlines() if "vqf:Q4_0_4X4" in line)
    assert line.split()[-1] == "no"
    assert VqfArtifact(tmp_path / "q4b").inspect()["vocab_size"] == VOCAB


def test_a_tower_is_not_lost_by_encoding_again(tmp_path: Path) -> None:
    with_vision(dual()).write(tmp_path / "m.vqf")
    put_beside(tmp_path)
    with pytest.raises(LabError, match="--wmode would lose its vision tower"):
        run(tmp_path / "m.vqf", tmp_path / "out", arguments("--wmode", "q4"))


def test_files_beside_are_carried_along(tmp_path: Path) -> None:
    old: Any = tmp_path / "old"
    old.mkdir()
    spec(random_weights(mixture=True), [("q4", "Q4_0", "")], mixture=True, flags=0x221).write(old / "model.vqf")
    put_beside(old, config=json.dumps({"model_type": "qwen3_moe", "norm_topk_prob": False}))
    run(old, tmp_path / "new", arguments("--layout", "3"))
    assert VqfArtifact(tmp_path / "new").config().norm_topk_prob is False  # type: ignore[attr-defined]
    assert vqf_codec("Q4_0", "4X4").name == VqfArtifact(tmp_path / "new").inspect()["codecs"]["trunk"]
