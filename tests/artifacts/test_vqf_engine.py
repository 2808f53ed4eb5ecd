"""A whole model from a VQF file through the engine's binder, against transformers holding the same decoded weights: names, orientation, experts, embedding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lab.artifacts.vqf import VqfArtifact
from lab.artifacts.vqf_convert import run
from lab.artifacts.vqf_flags import Engine
from lab.codecs.vqf import vqf_codec
from lab.counters import Counters
from lab.engines.path_binder import PathBinder
from lab.models import build
from tests.artifacts.gguf_models import hf_model, model_of
from tests.artifacts.test_vqf_writer import VOCAB, arguments, decoded, dense, mixture, saved
from tests.artifacts.vqf_files import one_thread  # noqa: F401


def with_weights_of(model: Any, artifact: VqfArtifact) -> Any:
    """The transformers model, holding what the file decodes to."""
    weights, state = artifact.weights(), model.state_dict()
    for full in state:
        name = full.removeprefix("model.")
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            (gate, up), (down,) = weights.experts(name.rpartition(".")[0], model.config.num_experts)
            state[full] = torch.cat([decoded(gate), decoded(up)], dim=1) if name.endswith("gate_up_proj") else decoded(down)
        else:
            state[full] = weights.vector(name) if state[full].ndim == 1 else decoded(weights.matrix(name)[0])
    model.load_state_dict(state)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "wmode", "layout"), [(dense, "q4", "0x3"), (dense, "q8", "0x3"), (dense, "q4i", "0x8"), (mixture, "q4", "0x3"), (mixture, "q8", "0x1")]
)
def test_logits_equal_transformers(tmp_path: Path, make: Any, wmode: str, layout: str) -> None:
    saved(make(), tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "out", arguments(wmode=wmode, layout=layout))
    word = int(layout, 0)
    artifact = VqfArtifact(tmp_path / "out", Engine(q8_8x8=bool(word & 1), q4_4x4=bool(word & 2)))
    config = artifact.config()
    ours = build(config, PathBinder(artifact.weights(), {}, torch.device("cpu"), torch.float32, Counters()))
    ids = torch.randint(0, VOCAB, (2, 23), generator=torch.Generator().manual_seed(1))
    theirs = with_weights_of(make(), artifact)(ids).logits  # a fresh model: bf16 spoils the rotary frequencies of the saved one
    assert float((ours.logits(ids) - theirs).abs().max()) < 1e-4 and float(theirs.std()) > 0.01
    state = ours.new_state(2, 23, torch.device("cpu"), torch.float32)
    steps = torch.cat([ours.logits(piece, state) for piece in ids.split([11, 1, 11], dim=1)], dim=1)
    assert float((steps - theirs).abs().max()) < 1e-4


@pytest.mark.parametrize(("arch", "tied"), [("qwen3", True), ("qwen3", False), ("qwen3moe", False)])
def test_a_gguf_file_is_a_source_too(tmp_path: Path, arch: str, tied: bool) -> None:
    """263 tokens are no whole tiles, so rows are asked for."""
    model = hf_model(arch, tied)
    model_of(model, arch).write(tmp_path / "m.gguf")
    run(tmp_path / "m.gguf", tmp_path / "out", arguments(wmode="q4", layout="0x0"))
    artifact = VqfArtifact(tmp_path / "out", Engine(q8_8x8=False, q4_4x4=False))
    assert artifact.inspect()["vocab_size"] == artifact.config().vocab_size == model.config.vocab_size
    weights, codec = artifact.weights(), vqf_codec("Q4_0")
    for full, value in model.state_dict().items():
        name = full.removeprefix("model.")
        if value.ndim == 1:
            assert torch.equal(weights.vector(name), value)
        elif value.ndim == 2 and name not in ("embed_tokens.weight", *(f"layers.{i}.mlp.gate.weight" for i in range(3))):
            assert torch.equal(decoded(weights.matrix(name)[0]), codec.decode(codec.encode(value), value.shape[1])), name
    if arch == "qwen3moe":
        assert with_weights_of(model, artifact) is model and artifact.file.header.arch.bos_id == 256
