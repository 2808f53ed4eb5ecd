"""The writer: models made by transformers go through safetensors into a VQF file and come back; geometry, failures and what they leave behind."""

from __future__ import annotations

import argparse
import errno
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from lab.artifacts import publish, vqf_sink
from lab.artifacts.hf import HfArtifact
from lab.artifacts.vqf import VqfArtifact
from lab.artifacts.vqf_convert import add_arguments, run
from lab.artifacts.vqf_flags import Engine
from lab.artifacts.vqf_plan import size_of
from lab.artifacts.vqf_writer import Written, write_vqf
from lab.artifacts.weights import Stored
from lab.codecs import cosine
from lab.codecs.vqf import PART, vqf_codec
from lab.errors import LabError
from tests.artifacts.vqf_files import one_thread, random_weights, tokenizer  # noqa: F401

VOCAB, HIDDEN = 104, 96
_SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    **{"intermediate_size": 160, "eos_token_id": 3, "bos_token_id": 1, "max_position_embeddings": 40960, "rope_parameters": {"rope_theta": 5e5}},
}


def dense(tied: bool = False, **changes: Any) -> Any:
    torch.manual_seed(1)
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**{**_SIZES, "tie_word_embeddings": tied, **changes}))


def mixture(**changes: Any) -> Any:
    torch.manual_seed(2)
    sizes = {**_SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True, "tie_word_embeddings": False}
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**{**sizes, **changes}))


def saved(model: Any, folder: Path) -> dict[str, Tensor]:
    """The model's folder as released, in bf16; returns its weights by name without `model.`."""
    model = model.to(torch.bfloat16)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                value.add_(torch.randn(value.shape, dtype=value.dtype), alpha=0.1)
    model.save_pretrained(folder)
    tokenizer(VOCAB - 1).save(str(folder / "tokenizer.json"))
    return {name.removeprefix("model."): value.float() for name, value in model.state_dict().items()}


def arguments(**chosen: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = [word for key, value in chosen.items() for word in ([f"--{key.replace('_', '-')}"] + ([] if value is True else [str(value)]))]
    return parser.parse_args(words)


def decoded(stored: Stored) -> Tensor:
    return stored.codec.decode(stored.parts, stored.shape[-1])


ENGINES = {"q4i": Engine(), "g256": Engine(wmode="g256")}


@pytest.mark.parametrize("wmode", ["dual", "q4", "q8", "q4i", "g256"])
def test_a_dense_model_goes_in_and_comes_out(tmp_path: Path, wmode: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512} if wmode == "g256" else {}
    source = saved(dense(**sizes), tmp_path / "hf")
    assert run(tmp_path / "hf", tmp_path / "out", arguments(wmode=wmode)) == 0
    assert "least cosine" in capsys.readouterr().out
    path = tmp_path / "out" / "model.vqf"
    artifact = VqfArtifact(tmp_path / "out", ENGINES.get(wmode))
    assert artifact.inspect()["checksum"] == "right" and path.stat().st_size == size_of(json.loads((tmp_path / "hf" / "config.json").read_text()), wmode)
    assert artifact.file.header.arch.bos_id == 1 and artifact.file.header.arch.max_seq_len == 8192
    least = 0.985 if wmode in ("q4", "q4i") else 0.9998
    for use in ("q8", "q4") if wmode == "dual" else (None,):
        weights = VqfArtifact(path, ENGINES.get(wmode), use=use).weights()
        for name, value in source.items():
            if value.ndim == 1:
                assert torch.equal(weights.vector(name), value)
            else:
                assert cosine(decoded(weights.matrix(name)[0]), value) > (0.985 if use == "q4" else least), name
    before, after = HfArtifact(tmp_path / "hf", "qwen3").config(), artifact.config()
    assert replace(before, eos_token_id=3) == replace(after, eos_token_id=3)  # type: ignore[type-var]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "qwen3"
    assert artifact.tokenizer().get_vocab() == tokenizer(VOCAB - 1).get_vocab()


def test_a_tied_head_is_quantised_apart(tmp_path: Path) -> None:
    source = saved(dense(tied=True), tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "out", arguments(wmode="q8"))
    weights = VqfArtifact(tmp_path / "out").weights()
    head = decoded(weights.matrix("lm_head.weight")[0])
    assert torch.equal(head, decoded(Stored(vqf_codec("Q8_0"), vqf_codec("Q8_0").encode(source["embed_tokens.weight"]), (VOCAB, HIDDEN))))


@pytest.mark.parametrize("wmode", ["q4", "q8"])
def test_a_mixture_goes_in_and_comes_out(tmp_path: Path, wmode: str) -> None:
    source = saved(mixture(), tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "out", arguments(wmode=wmode))
    artifact = VqfArtifact(tmp_path / "out")
    assert artifact.inspect()["layers"] == 2 and artifact.config() == HfArtifact(tmp_path / "hf", "qwen3_moe").config()
    weights = artifact.weights()
    for layer in range(2):
        prefix = f"layers.{layer}.mlp.experts"
        (gate, up), (down,) = weights.experts(prefix, 4)
        whole = source[f"{prefix}.gate_up_proj"]
        for stack, value in ((gate, whole[:, :64]), (up, whole[:, 64:]), (down, source[f"{prefix}.down_proj"])):
            for e in range(4):
                one = stack.codec.decode(stack.codec.select(stack.parts, e), stack.shape[-1])
                assert cosine(one, value[e]) > (0.985 if wmode == "q4" else 0.9998)
        assert torch.equal(decoded(weights.matrix(f"layers.{layer}.mlp.gate.weight")[0]), source[f"layers.{layer}.mlp.gate.weight"])


def test_layers_lie_one_after_the_other_and_pads_are_zero(tmp_path: Path) -> None:
    source = saved(dense(), tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "out", arguments(wmode="dual", layout="0x1"))
    file = VqfArtifact(tmp_path / "out", Engine(q4_4x4=False)).file
    stacked = torch.stack([source[f"layers.{i}.mlp.up_proj.weight"] for i in range(2)])
    assert file.raw("q4_up").tobytes() == vqf_codec("Q4_0").encode(stacked)[PART].numpy().tobytes()
    assert file.raw("q8_up").tobytes() == vqf_codec("Q8_0", "8X8").encode(stacked)[PART].numpy().tobytes()
    content, ends = file.path.read_bytes(), sorted((e.offset, e.offset + e.nbytes) for e in file.entries.values())
    for (_, end), (begin, _) in zip(ends, [*ends[1:], (file.header.file_len, 0)], strict=True):
        assert content[end:begin] == bytes(begin - end)


class Rearranged:
    """A source that splits a matrix into row blocks and permutes its columns, as GGUF files may."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.where = inner, inner.where
        self.order = torch.randperm(HIDDEN, generator=torch.Generator().manual_seed(3))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def matrix(self, name: str) -> Sequence[Stored]:
        weight = decoded(self.inner.matrix(name)[0])
        if weight.shape[1] != HIDDEN:
            return [Stored(vqf_codec("F32"), vqf_codec("F32").encode(weight), tuple(weight.shape))]
        turned = weight[:, self.order]  # column c of the file is input order[c]
        return [Stored(vqf_codec("F32"), vqf_codec("F32").encode(rows), tuple(rows.shape)) for rows in turned.split([5, len(turned) - 5])]

    def column_order(self, name: str) -> Tensor | None:
        return self.order if decoded(self.inner.matrix(name)[0]).shape[1] == HIDDEN else None


class Spoilt(Rearranged):
    """A source whose last up projection holds a NaN."""

    def matrix(self, name: str) -> Sequence[Stored]:
        weight = decoded(self.inner.matrix(name)[0])
        if name == "layers.1.mlp.up_proj.weight":
            weight[-1, 5] = float("nan")
        return [Stored(vqf_codec("F32"), {PART: weight.view(torch.uint8)}, tuple(weight.shape))]

    def column_order(self, name: str) -> Tensor | None:
        return None


def test_split_and_permuted_sources_give_the_same_file(tmp_path: Path) -> None:
    saved(dense(), tmp_path / "hf")
    artifact: Any = HfArtifact(tmp_path / "hf", "qwen3")
    for name, weights in (("plain", artifact.weights()), ("turned", Rearranged(artifact.weights()))):
        write_vqf(weights, artifact.config(), artifact.tokenizer(), tmp_path / name / "model.vqf", "dual")
    assert (tmp_path / "plain" / "model.vqf").read_bytes() == (tmp_path / "turned" / "model.vqf").read_bytes()


def written(folder: Path, path: Path, wmode: str = "q4", **options: Any) -> Written:
    artifact: Any = HfArtifact(folder, "qwen3")
    return write_vqf(artifact.weights(), artifact.config(), artifact.tokenizer(), path, wmode, **options)


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    saved(dense(), tmp_path / "hf")
    seen: list[tuple[int, int, str]] = []
    done = written(tmp_path / "hf", tmp_path / "m.vqf", progress=lambda *step: seen.append(step))
    tensors = [s for s in seen if s[2] != "checksum"]
    assert tensors[-1][0] == tensors[-1][1] == sum(s.nbytes for s in done.sums.values()) and seen[-1][2] == "checksum" and seen[-1][0] == seen[-1][1]
    assert done.sums["vqf:F32"].lossless and not done.sums["vqf:Q4_0_4X4"].lossless and done.nbytes == done.path.stat().st_size
    assert sorted(done.sums["vqf:F16"].tensors) == ["token_embed"]


class Fault(BaseException):
    """Ends the writer from within, as a signal does."""


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), Fault()])
@pytest.mark.parametrize("force", [False, True])
def test_a_failure_leaves_nothing_and_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException, force: bool) -> None:
    saved(dense(), tmp_path / "hf")
    path = tmp_path / "out" / "m.vqf"
    path.parent.mkdir()
    if force:
        path.write_bytes(b"old")
    count, real = 0, os.pwrite

    def failing(*call: Any) -> int:
        nonlocal count
        count += 1
        if count > 12:
            raise fault
        return real(*call)

    monkeypatch.setattr(vqf_sink.os, "pwrite", failing)
    with pytest.raises(LabError if isinstance(fault, OSError) else Fault) as caught:
        written(tmp_path / "hf", path, force=force)
    if isinstance(fault, OSError):
        assert str(caught.value) == f"{path}: cannot be written (No space left on device); nothing was left behind"
    assert [p.name for p in path.parent.iterdir()] == (["m.vqf"] if force else [])
    assert not force or path.read_bytes() == b"old"


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(dense(), tmp_path / "hf")
    whole = written(tmp_path / "hf", tmp_path / "a" / "m.vqf").path.read_bytes()
    real = os.pwrite
    monkeypatch.setattr(vqf_sink.os, "pwrite", lambda handle, data, at: real(handle, data[: max(1, len(data) * 2 // 3)], at))
    assert written(tmp_path / "hf", tmp_path / "b" / "m.vqf").path.read_bytes() == whole


def test_a_disk_that_is_too_small_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(dense(), tmp_path / "hf")
    monkeypatch.setattr(publish.shutil, "disk_usage", lambda _: argparse.Namespace(free=1000))
    with pytest.raises(LabError, match=r"m\.vqf: needs \d+ bytes, .* has 1000 free; make room"):
        written(tmp_path / "hf", tmp_path / "out" / "m.vqf")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_what_is_there_is_kept_without_force(tmp_path: Path) -> None:
    saved(dense(), tmp_path / "hf")
    path = written(tmp_path / "hf", tmp_path / "out" / "model.vqf").path
    with pytest.raises(LabError, match="exists; choose another name or say --force"):
        written(tmp_path / "hf", path)
    with pytest.raises(LabError, match="exists; choose another name or say --force"):
        run(tmp_path / "hf", tmp_path / "out", arguments(wmode="q4"))
    assert run(tmp_path / "hf", tmp_path / "out", arguments(wmode="q8", force=True)) == 0 and VqfArtifact(path).file.sets == ("q8",)
    (path.parent / "tokenizer.json").write_text("{}")
    with pytest.raises(LabError, match=r"tokenizer\.json exists and says something else"):
        written(tmp_path / "hf", path.with_name("other.vqf"))
    assert not path.with_name("other.vqf").exists()


@pytest.mark.parametrize(
    ("changes", "chosen", "message"),
    [
        ({"vocab_size": 108}, {"wmode": "q8"}, r"q8_lm \[108, 96\]: vocab_size 108 is no multiple of 8 \(vqf:Q8_0_8X8\); clear the tile bit"),
        ({"vocab_size": 106}, {"wmode": "q4"}, r"q4_lm \[106, 96\]: vocab_size 106 is no multiple of 4 \(vqf:Q4_0_4X4\)"),
        ({"intermediate_size": 80}, {"wmode": "q4"}, r"hf: q4_down \[96, 80\]: intermediate_size 80 is no multiple of the 32 weights of vqf:Q4_0_4X4"),
        ({}, {"wmode": "g256"}, r"hf: q8_q \[128, 96\]: hidden_size 96 is no multiple of the 256 weights of vqf:G256_8X8; choose another --wmode"),
        ({}, {"wmode": "q4", "layout": "0x7"}, "--layout 0x7: not possible with --wmode q4, whose layout is 0x3; only bits 0 and 1 may differ"),
        ({}, {"wmode": "q8", "q8_layout": "rows"}, "--q8-layout: only for a VQF source"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, {"wmode": "q4"}, "cannot say RoPE of type 'linear'"),
    ],
)
def test_what_the_format_cannot_hold_is_one_line(tmp_path: Path, changes: dict[str, Any], chosen: dict[str, Any], message: str) -> None:
    saved(dense(**changes), tmp_path / "hf")
    with pytest.raises(LabError, match=message) as caught:
        run(tmp_path / "hf", tmp_path / "out", arguments(**chosen))
    assert len(str(caught.value).splitlines()) == 1 and not (tmp_path / "out" / "model.vqf").exists()


def test_an_odd_vocabulary_is_written_without_tiles(tmp_path: Path) -> None:
    source = saved(dense(vocab_size=105), tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "out", arguments(wmode="q4", layout="0x0"))
    weights = VqfArtifact(tmp_path / "out", Engine(q8_8x8=False, q4_4x4=False)).weights()
    assert cosine(decoded(weights.matrix("lm_head.weight")[0]), source["lm_head.weight"]) > 0.985


def test_eight_bit_rows_come_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(dense(), tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "out", arguments(wmode="q8", layout="0x2"))
    assert "a reader must be told that these are rows" in capsys.readouterr().out
    assert VqfArtifact(tmp_path / "out", Engine(q8_8x8=False), q8_layout="rows").inspect()["ambiguous"] is True


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved(hf.LlamaForCausalLM(hf.LlamaConfig(**_SIZES)), tmp_path / "hf")
    with pytest.raises(LabError, match="no q_norm and k_norm; --to vqf writes the qwen3 family only"):
        run(tmp_path / "hf", tmp_path / "out", arguments())
    mixed = mixture(mlp_only_layers=[1])
    saved(mixed, tmp_path / "mixed")
    with pytest.raises(LabError, match="layer 1 of a mixture has no experts"):
        run(tmp_path / "mixed", tmp_path / "out", arguments())
    with pytest.raises(LabError, match=r"config\.json: no such file"):
        run(tmp_path / "none", tmp_path / "out", arguments())


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    saved(dense(), tmp_path / "hf")
    artifact: Any = HfArtifact(tmp_path / "hf", "qwen3")
    with pytest.raises(LabError, match="tensor q4_up: codec vqf:Q4_0_4X4: the weight holds NaN or infinity"):
        write_vqf(Spoilt(artifact.weights()), artifact.config(), artifact.tokenizer(), tmp_path / "m.vqf", "q4")
    assert not (tmp_path / "m.vqf").exists()
