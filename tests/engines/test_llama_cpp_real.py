"""The real llama.cpp, where llama-cpp-python is installed (extra `[llama]`), against transformers on the same random weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from lab.admission import decide
from lab.engines.llama_cpp.evidence import check
from lab.engines.llama_cpp.library import build_facts, library
from lab.engines.llama_cpp.log import Log, placement
from lab.engines.llama_cpp.quality import forward, step_parity, tolerance
from lab.engines.llama_cpp.session import Context, LlamaModel, Settings
from lab.errors import GapError
from lab.record import Status
from tests.artifacts.gguf_models import LAYERS, VOCAB, hf_model
from tests.engines.llama_helpers import ARCHES, BOUNDS, attempt, cell_for, write_model

pytest.importorskip("llama_cpp", reason="the real module is an extra: pip install 'migration-lab[llama]'")


@pytest.fixture
def lib() -> Any:
    return library()


@pytest.fixture(params=sorted(ARCHES))
def loaded(request: pytest.FixtureRequest, tmp_path: Path, lib: Any) -> Iterator[tuple[str, LlamaModel]]:
    """A random model in F32 with a KV cache in F32, so that only the order of sums is left."""
    path = write_model(tmp_path, request.param)
    with LlamaModel(lib, Log(lib), path, Settings(threads=1, kv="f32")) as model:
        yield request.param, model


def random_ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_logits_are_those_of_transformers(loaded: tuple[str, LlamaModel]) -> None:
    arch, model = loaded
    ids = random_ids(2, 77)
    with torch.no_grad():
        expected = hf_model(arch)(ids).logits
    with Context(model, 1, 128) as context:
        found = forward(context)(ids)
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
        # The same again after other text: a cleared context forgets.
        assert torch.equal(forward(context)(ids[:1])[0], found[0])
        assert context.counted() == context.evaluated == 3 * 77


def test_lanes_together_give_what_each_gives_alone(loaded: tuple[str, LlamaModel]) -> None:
    arch, model = loaded
    ids = random_ids(4, 30)
    with torch.no_grad():
        expected = hf_model(arch)(ids).logits.numpy()
    with Context(model, 4, 40) as context:
        for lane in range(4):
            found = context.prefill(ids[lane, :20].numpy(), lane)
            assert found.shape == (1, VOCAB)
            np.testing.assert_allclose(found[0], expected[lane, 19], atol=1e-5 * np.abs(expected).max())
        for t in range(20, 30):
            found = context.step(ids[:, t].numpy())
            np.testing.assert_allclose(found, expected[:, t], atol=1e-5 * np.abs(expected).max())
        assert [context.length(lane) for lane in range(4)] == [30] * 4
        assert context.counted() == context.evaluated == 120


def test_places_are_read_from_the_log(loaded: tuple[str, LlamaModel]) -> None:
    _, model = loaded
    with Context(model, 1, 64) as context:
        found = placement(model.said + context.said)
    assert found["layers"] == [[layer, "CPU"] for layer in range(LAYERS + 1)]
    assert found["states"] == [[layer, "CPU"] for layer in range(LAYERS)]
    assert Path(found["file"]).name == "model.gguf"
    assert found["flash_attention"] == "disabled"
    assert any("model" in kinds for kinds in found["buffers_mib"].values())
    assert found["buffers_mib"]["CPU"]["KV"] > 0


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0, Kind.Q4_0])
def test_batches_and_steps_agree_within_the_tolerance(kind: Kind, tmp_path: Path, lib: Any) -> None:
    from lab.artifacts.gguf import open_gguf
    from lab.measure.text import Corpus

    path = write_model(tmp_path, kind=kind)
    corpus = Corpus(random_ids(700), None, {"name": "random"})
    with LlamaModel(lib, Log(lib), path, Settings(threads=1)) as model, Context(model, 1, 640) as context:
        found = step_parity(context, corpus, tolerance(open_gguf(path)))
    assert found["kld_mean"] <= found["tolerance"] == (1e-3 if kind is Kind.F16 else 5e-2)
    assert found["batch_tokens"] == 512
    assert math.isclose(found["nll_batch_nat"], found["nll_steps_nat"], rel_tol=0.05)


@pytest.mark.parametrize(("broken", "reason"), [(b"GGUF", "does not load broken.gguf: "), (b"no gguf at all", "does not load broken.gguf: ")])
def test_a_broken_file_is_a_load_failure_with_the_last_word(broken: bytes, reason: str, tmp_path: Path, lib: Any) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(broken)
    with pytest.raises(GapError) as caught:
        LlamaModel(lib, Log(lib), path, Settings(threads=1))
    assert caught.value.status is Status.LOAD_FAILED
    assert reason in caught.value.reason
    assert "gave no reason" not in caught.value.reason


def test_a_whole_attempt_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.measure.machine.machine_bounds", lambda *_: dict(BOUNDS))
    # Weights near zero, since random ones guess worse than chance, which is refused.
    hf = hf_model("llama")
    for parameter in hf.parameters():
        parameter.data *= 0.05
    monkeypatch.setattr("tests.engines.llama_helpers.hf_model", lambda arch: hf)
    write_model(tmp_path)
    cell = cell_for(half=7)
    result = attempt(cell, tmp_path)
    decision = decide(cell, result, check)
    assert (decision.status, decision.reason, result.notes) == (Status.OK, "", [])
    assert result.evidence["tokenization"]["equal"]
    text = (tmp_path / "text.txt").read_text()
    assert result.evidence["tokenization"]["ours"] == len(text)
    facts = build_facts(library())
    assert facts["devices"][0]["type"] in ("CPU", "GPU", "IGPU", "ACCEL")
    assert "CPU" in facts["system_info"]
    assert decision.metrics["ppl_llama_half"].value == pytest.approx(VOCAB, rel=0.05)
