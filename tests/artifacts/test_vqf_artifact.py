"""A VQF file as an artifact: every weight by its Hugging Face name, experts by rows and columns, the format's traps, what lies beside the file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.artifacts.vqf import VqfArtifact
from lab.artifacts.vqf_file import VqfFile
from lab.artifacts.vqf_flags import Engine, LayoutRefusedError
from lab.artifacts.vqf_weights import VqfWeights
from lab.artifacts.weights import Stored
from lab.codecs.vqf import vqf_codec
from lab.errors import LabError
from tests.artifacts.vqf_files import DIM, EXPERTS, HEAD_DIM, LAYERS, VOCAB, WIDTH, Spec, dual, one_thread, put_beside, q4, random_weights, spec  # noqa: F401

NAMES = {
    "self_attn.q_proj.weight": "q",
    "self_attn.k_proj.weight": "k",
    "self_attn.v_proj.weight": "v",
    "self_attn.o_proj.weight": "o",
    "mlp.gate_proj.weight": "gate",
    "mlp.up_proj.weight": "up",
    "mlp.down_proj.weight": "down",
}
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_norm": "q_norm", "self_attn.k_norm": "k_norm"}


def decoded(stored: Stored) -> Tensor:
    return stored.codec.decode(stored.parts, stored.shape[-1])


def requantised(weight: Tensor, plain: str) -> Tensor:
    codec = vqf_codec(plain)
    return codec.decode(codec.encode(weight), weight.shape[-1])


LAYOUTS: list[tuple[list[tuple[str, str, str]], int, Engine, dict[str, Any]]] = [
    ([("q4", "Q4_0", "4X4")], 0x23, Engine(), {}),
    ([("q4", "Q4_0", "")], 0x21, Engine(q4_4x4=False), {}),
    ([("q8", "Q8_0", "8X8")], 0x23, Engine(), {}),
    ([("q8", "Q8_0", "")], 0x22, Engine(q8_8x8=False), {"q8_layout": "rows"}),
    ([("q8", "Q8_0", "4X4")], 0x22, Engine(q8_8x8=False), {"q8_layout": "4x4"}),
    ([("q8", "Q4I", "")], 0x2A, Engine(), {}),
    ([("q8", "Q8_0", "8X8"), ("q4", "Q4_0", "4X4")], 0x23, Engine(), {}),
    ([("q8", "Q8_0", "8X8"), ("q4", "Q4_0", "4X4")], 0x23, Engine(), {"use": "q4"}),
]


@pytest.mark.parametrize(("sets", "flags", "engine", "options"), LAYOUTS)
def test_every_weight_comes_out_by_name(tmp_path: Path, sets: list[tuple[str, str, str]], flags: int, engine: Engine, options: dict[str, Any]) -> None:
    source = random_weights(3)
    artifact = VqfArtifact(spec(source, sets, flags=flags).write(tmp_path / "model.vqf"), engine, **options)
    put_beside(tmp_path)
    weights = artifact.weights()
    used, plain, tile = next(s for s in sets if s[0] == options.get("use", sets[0][0]))
    assert weights.used == used
    for layer in range(LAYERS):
        for name, kind in NAMES.items():
            (stored,) = weights.matrix(f"layers.{layer}.{name}")
            assert stored.shape == source[kind].shape[1:] and stored.codec.name == vqf_codec(plain, tile).name
            assert torch.equal(decoded(stored), requantised(source[kind][layer], plain))
        for name, key in NORMS.items():
            assert torch.equal(weights.vector(f"layers.{layer}.{name}.weight"), source[key][layer])
    assert torch.equal(decoded(weights.matrix("lm_head.weight")[0]), requantised(source["lm"], plain))
    assert torch.equal(decoded(weights.matrix("embed_tokens.weight")[0]), requantised(source["token_embed"], "F16"))
    assert torch.equal(weights.vector("norm.weight"), source["final_norm"])
    found = artifact.inspect()
    assert found["codecs"]["trunk"] == vqf_codec(plain, tile).name and found["ambiguous"] is ("q8_layout" in options) and found["checksum"] == "right"


def test_config_tokenizer_and_facts(tmp_path: Path) -> None:
    artifact = VqfArtifact(q4().write(tmp_path / "weights.vqf").parent)
    put_beside(tmp_path)
    config: Any = artifact.config()
    assert (config.num_layers, config.vocab_size, config.hidden_size, config.head_dim, config.eos_token_id) == (LAYERS, VOCAB, DIM, HEAD_DIM, 2)
    assert artifact.config_fields()["rms_norm_eps"] == 1e-6 and artifact.config_fields()["rope_theta"] == 5e6 and config.tie_word_embeddings is False
    assert artifact.tokenizer().get_vocab_size() == VOCAB
    found = artifact.inspect()
    assert (found["format"], found["layers"], found["tensors"], found["flags"], found["sets"]) == ("vqf", LAYERS, 14, 0x23, ["q4"])
    assert set(found["files"]) == {"weights.vqf", "tokenizer.json"} and len(found["sha256"]) == 64 and found["notes"] == []
    one = found["sha256"]
    put_beside(tmp_path, VOCAB - 1)
    assert artifact.inspect()["sha256"] != one


def test_folders_are_searched_in_kestrels_order(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"no VQF file; looked for model\.vqf, weights\.vqf, vllm\.vqf"):
        VqfArtifact(tmp_path)
    q4(1).write(tmp_path / "vllm.vqf")
    assert VqfArtifact(tmp_path).path.name == "vllm.vqf"
    q4(2).write(tmp_path / "model.vqf")
    assert VqfArtifact(tmp_path).path.name == "model.vqf"


def test_no_option_lets_a_foreign_layout_in(tmp_path: Path) -> None:
    path = spec(random_weights(), [("q4", "Q4_0", "")], flags=0x21).write(tmp_path / "model.vqf")
    for options in ({}, {"use": "q4"}, {"engine": Engine(wmode="g256")}, {"engine": Engine(q8_8x8=False)}):
        with pytest.raises(LayoutRefusedError, match=r"--to vqf --layout"):
            VqfArtifact(path, **options)  # type: ignore[arg-type]
    assert isinstance(LayoutRefusedError(path, 1, 3), LabError)


def test_x8_copies_are_refused_at_the_gate_and_never_read(tmp_path: Path) -> None:
    base = q4(flags=0x27)
    junk = [("x8_q", 4, 1, 1, b"\xaa" * (LAYERS * 128 * DIM // 32 * 18))]
    path = replace(base, tensors=[*base.tensors, *junk]).write(tmp_path / "model.vqf")
    with pytest.raises(LayoutRefusedError, match="layout flags 0x7, the engine is configured for 0x3"):
        VqfArtifact(path)
    file = VqfFile(path)
    assert file.sets == ("q4",)
    assert torch.equal(decoded(VqfWeights(file).matrix("layers.0.self_attn.q_proj.weight")[0]), requantised(random_weights()["q"][0], "Q4_0"))


def test_bit_0_clear_is_ambiguous_and_the_blocks_tell(tmp_path: Path) -> None:
    engine = Engine(q8_8x8=False)
    put_beside(tmp_path)
    for tile, told, wrong in (("", "rows", "4x4"), ("4X4", "4x4", "rows")):
        path = spec(random_weights(), [("q8", "Q8_0", tile)], flags=0x22).write(tmp_path / "model.vqf")
        fits = vqf_codec("Q8_0", tile).name
        with pytest.raises(LabError, match=rf"ambiguous: flag bit 0 is clear.*say --q8-layout rows or --q8-layout 4x4 .*fit: {fits}\)") as caught:
            VqfArtifact(path, engine).weights().matrix("lm_head.weight")
        assert len(str(caught.value).splitlines()) == 1
        assert VqfArtifact(path, engine, q8_layout=told).inspect()["notes"]
        with pytest.raises(LabError, match=rf"of its blocks fit, but all look like {fits}; the flags are wrong"):
            VqfArtifact(path, engine, q8_layout=wrong).inspect()


def test_blocks_that_contradict_the_flags_are_found(tmp_path: Path) -> None:
    """A flag word edited by hand: 0x1 data under 0x3."""
    put_beside(tmp_path)
    path = spec(random_weights(), [("q4", "Q4_0", "")], flags=0x23).write(tmp_path / "model.vqf")
    with pytest.raises(LabError, match="q4_q of layer 0 is said to be vqf:Q4_0_4X4, .* all look like vqf:Q4_0; the flags are wrong"):
        VqfArtifact(path).inspect()


def test_the_layout_is_asked_for_only_where_it_is_open(tmp_path: Path) -> None:
    path = dual().write(tmp_path / "model.vqf")
    with pytest.raises(LabError, match="--q8-layout rows: only for 8-bit matrices with flag bit 0 clear"):
        VqfArtifact(path, q8_layout="rows")
    with pytest.raises(LabError, match="no q8 matrices; the file has q4"):
        VqfArtifact(q4().write(tmp_path / "other.vqf"), use="q8")


@pytest.mark.parametrize(("vocab", "sets", "flags", "step"), [(84, "q8", 0x23, 8), (82, "q4", 0x23, 4)])
def test_a_vocabulary_that_is_no_whole_tile_is_refused(tmp_path: Path, vocab: int, sets: str, flags: int, step: int) -> None:
    """The converter tiles lm_head in whole groups of rows and leaves the rest as rows."""
    weights = random_weights(vocab=vocab)
    plain = "Q8_0" if sets == "q8" else "Q4_0"
    path = spec(weights, [(sets, plain, "")], flags=flags).write(tmp_path / "model.vqf")
    with pytest.raises(LabError, match=f"{sets}_lm: vocab_size {vocab} is no multiple of {step}, so its converter left"):
        VqfArtifact(path).weights().matrix("lm_head.weight")
    with pytest.raises(LabError, match="vocab_size"):
        VqfArtifact(path).inspect()


MIXTURE = json.dumps({"model_type": "qwen3_moe", "norm_topk_prob": True})


@pytest.mark.parametrize("sets", [[("q4", "Q4_0", "4X4")], [("q8", "Q8_0", "8X8")]])
def test_experts_own_rows_of_gate_and_up_and_columns_of_down(tmp_path: Path, sets: list[tuple[str, str, str]]) -> None:
    source = random_weights(7, mixture=True)
    artifact = VqfArtifact(spec(source, sets, mixture=True).write(tmp_path / "model.vqf"))
    put_beside(tmp_path, config=MIXTURE)
    weights, plain = artifact.weights(), sets[0][1]
    for layer in range(LAYERS):
        (gate, up), (down,) = weights.experts(f"layers.{layer}.mlp.experts", EXPERTS)
        assert gate.shape == up.shape == (EXPERTS, WIDTH, DIM) and down.shape == (EXPERTS, DIM, WIDTH)
        for stack, kind in ((gate, "gate"), (up, "up")):
            assert torch.equal(decoded(stack), requantised(source[kind][layer], plain).view(EXPERTS, WIDTH, DIM))
        whole = requantised(source["down"][layer], plain)
        assert torch.equal(decoded(down), whole.view(DIM, EXPERTS, WIDTH).transpose(0, 1))
        for e in (0, 3):
            one = down.codec.select(down.parts, e)
            assert torch.equal(down.codec.decode(one, WIDTH), whole[:, e * WIDTH : (e + 1) * WIDTH])
        router = weights.matrix(f"layers.{layer}.mlp.gate.weight")[0]
        assert torch.equal(decoded(router), source["moe_router"][layer])
    config: Any = artifact.config()
    assert (config.num_experts, config.experts_per_token, config.expert_width, config.norm_topk_prob) == (EXPERTS, 2, WIDTH, True)
    assert artifact.inspect()["layers"] == LAYERS and artifact.arch == "qwen3_moe"
    assert "layers.0.mlp.gate_proj.weight" not in weights
    with pytest.raises(LabError, match="6 experts asked for; the file has 5"):
        weights.experts("layers.0.mlp.experts", 6)


def test_experts_narrower_than_a_block_are_refused(tmp_path: Path) -> None:
    """10 experts of 16 columns: a block of down belongs to two of them."""
    base = spec(random_weights(7, mixture=True), [("q4", "Q4_0", "4X4")], mixture=True)
    router = torch.zeros(LAYERS, 10, DIM).numpy().tobytes()
    tensors = [(*t[:4], router) if t[0] == "moe_router" else t for t in base.tensors]
    path = replace(base, tensors=tensors, words={**base.words, 180: 10, 184: 16}).write(tmp_path / "model.vqf")
    with pytest.raises(LabError, match="moe_ffn 16 is no multiple of 32 columns and 4 rows"):
        VqfArtifact(path).weights().experts("layers.0.mlp.experts", 10)


def test_how_experts_are_weighed_must_be_said_beside_the_file(tmp_path: Path) -> None:
    artifact = VqfArtifact(spec(random_weights(mixture=True), [("q4", "Q4_0", "4X4")], mixture=True).write(tmp_path / "model.vqf"))
    with pytest.raises(LabError, match="norm_topk_prob is not in a VQF header; put the model's config.json"):
        artifact.config()
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(LabError, match=r"config\.json: expected an object"):
        artifact.config()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LabError, match=r"config\.json: not valid JSON"):
        artifact.config()


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    artifact = VqfArtifact(q4().write(tmp_path / "model.vqf"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": 4}))
    with pytest.raises(LabError, match="the header has num_hidden_layers 3, config.json beside it 4"):
        artifact.config()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "text_config": {"hidden_size": 97}}))
    with pytest.raises(LabError, match="the header has hidden_size 96, config.json beside it 97"):
        artifact.config()
    (tmp_path / "config.json").unlink()
    with pytest.raises(LabError, match=r"no tokenizer\.json beside it; put"):
        artifact.tokenizer()
    (tmp_path / "vocab.bin").write_bytes(b"")
    with pytest.raises(LabError, match=r"vocab\.bin is there, but is not read"):
        artifact.inspect()
    put_beside(tmp_path, VOCAB + 1)
    with pytest.raises(LabError, match=f"token id {VOCAB} does not fit the model's vocabulary of {VOCAB} rows"):
        artifact.inspect()
    put_beside(tmp_path, 2)
    with pytest.raises(LabError, match="the header's eos_id 2 is no token"):
        artifact.inspect()


def test_a_model_without_query_norms_is_refused(tmp_path: Path) -> None:
    base: Spec = q4()
    path = replace(base, words={**base.words, 64: 0}).without("q_norm", "k_norm").write(tmp_path / "model.vqf")
    with pytest.raises(LabError, match="the header says no q_norm; the lab reads the qwen3 family only"):
        VqfArtifact(path).config()


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    weights = VqfArtifact(q4().write(tmp_path / "model.vqf")).weights()
    for name in ("layers.3.self_attn.q_proj.weight", "layers.0.mlp.gate.weight", "layers.0.mlp.experts", "model.norm.weight", "x" * 500, "layers.0.bias\n"):
        assert name not in weights
        with pytest.raises(LabError, match="no tensor for") as caught:
            weights.matrix(name)
        assert len(str(caught.value).splitlines()) == 1
    for ask, name in ((weights.vector, "lm_head.weight"), (weights.matrix, "norm.weight")):
        with pytest.raises(LabError, match=f"{name} is no"):
            ask(name)
    with pytest.raises(LabError, match="the format has none"):
        weights.integers("a")
    with pytest.raises(LabError, match="the format has none"):
        weights.table_shards("t")
    with pytest.raises(LabError, match="the format has none"):
        weights.table_shard("t", 0)
    assert weights.column_order("lm_head.weight") is None


def test_g256_groups_that_cross_rows_decode_as_eight_bit_frames(tmp_path: Path) -> None:
    """DIM is 96: a group of 256 spans rows, so the codec that knows groups cannot hold a row, and the frames are Q8_0's anyway."""
    source = random_weights(2)
    path = spec(source, [("q8", "Q8_0", "8X8")], flags=0x33).write(tmp_path / "model.vqf")
    (stored,) = VqfArtifact(path, Engine(wmode="g256")).weights().matrix("layers.1.mlp.up_proj.weight")
    assert stored.codec.name == "vqf:Q8_0_8X8" and torch.equal(decoded(stored), requantised(source["up"][1], "Q8_0"))
