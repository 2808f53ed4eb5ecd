"""What each side of a stage measures alone: likelihoods and greedy ids against transformers, products against the file's own tensors, planted faults."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.engines.local import LocalEngine
from lab.errors import GapError, LabError
from lab.measure.greedy import continuation, first_flip, greedy_metrics
from lab.measure.passages import FIRST_TURN, REFERENCES, SECOND_TURN, nll_metric, passages, passages_nll
from lab.measure.products import ROWS, compare, decoding, products, random_outputs, random_rows, verify_metric
from lab.measure.segments import gemm_share, marked
from tests.measure.stage_models import LAYERS, engine, hf_qwen3, random_corpus, write

MODEL = hf_qwen3()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small only make threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    write(MODEL, path)
    return path


@pytest.fixture
def loaded(folder: Path) -> LocalEngine:
    return engine(folder)


def _replace(loaded: LocalEngine, name: str, wrap: Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]) -> None:
    """Puts `wrap` around the matrix `name`."""
    (product,) = (p for p in products(loaded.model) if p.name == name)
    setattr(product.owner, product.attribute, wrap(getattr(product.owner, product.attribute)))


def _slow(true: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same, 20 ms later: far more than all else in a pass of this model."""

    def run(x: Tensor) -> Tensor:
        time.sleep(0.02)
        return true(x)

    return run


def _hf_nll(ids: Tensor) -> Tensor:
    with torch.no_grad():
        log_p = MODEL(ids[None]).logits[0].double().log_softmax(-1)
    return -log_p[:-1].gather(1, ids[1:, None]).squeeze(1)[FIRST_TURN + SECOND_TURN - 1 :]


def test_the_passages_likelihood_is_transformers_and_weighted_by_tokens(loaded: LocalEngine) -> None:
    corpus = random_corpus()
    found = nll_metric(passages_nll(loaded, corpus), corpus)
    expected = [_hf_nll(ids) for ids in passages(corpus)[0]]
    assert [len(part) for part in expected] == list(REFERENCES)
    assert found.value == pytest.approx(float(torch.cat(expected).mean()), rel=1e-5)
    assert abs(found.value - sum(float(part.mean()) for part in expected) / len(expected)) > 1e-3, "the mean of means would not be noticed"
    assert [p["nll_mean_nat"] for p in found.details["passages"]] == pytest.approx([float(part.mean()) for part in expected], rel=1e-5)


def test_passages_are_the_texts_own_ids_and_need_a_long_enough_text() -> None:
    corpus = random_corpus(tokens=777)
    rows, starts = passages(corpus)
    assert all(torch.equal(row, corpus.ids[start : start + len(row)]) for row, start in zip(rows, starts, strict=True))
    assert starts == sorted(set(starts))
    with pytest.raises(LabError, match="100 tokens are too few"):
        passages(random_corpus(tokens=100))


def test_a_likelihood_that_is_not_finite_is_refused_with_its_passage(loaded: LocalEngine) -> None:
    calls = iter(range(1000))
    _replace(loaded, "lm_head", lambda head: lambda x: head(x) * (float("nan") if next(calls) == 2 else 1.0))
    with pytest.raises(ValueError, match="passage 3"):
        passages_nll(loaded, random_corpus())


def test_greedy_ids_are_those_of_transformers(loaded: LocalEngine) -> None:
    prompt = random_corpus(seed=9).ids[:21]
    expected = MODEL.generate(prompt[None], attention_mask=torch.ones(1, 21), max_new_tokens=40, do_sample=False, eos_token_id=-1, pad_token_id=0)[0, 21:]
    assert continuation(loaded, prompt, 40).ids == expected.tolist()


@pytest.mark.parametrize("position", [0, 7, 23])
def test_a_planted_flip_is_found_at_its_position(loaded: LocalEngine, position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random_corpus(seed=position).ids[:32]
    right = continuation(loaded, prompt, 24)
    true, calls = loaded.logits, iter(range(1000))

    def wrong(ids: Tensor, state: Any = None, last_only: bool = False) -> Tensor:
        logits = true(ids, state, last_only).clone()
        if next(calls) == position:
            logits[0, -1, right.second[position]] += right.gap[position] + 0.25
        return logits

    monkeypatch.setattr(loaded, "logits", wrong)
    flip = first_flip(right, continuation(loaded, prompt, 24))
    assert flip is not None
    assert (flip["position"], flip["second_best_taken"]) == (position, True)
    assert (flip["cpu_id"], flip["device_id"]) == (right.ids[position], right.second[position])
    assert flip["device_gap"] == pytest.approx(0.25, abs=1e-4)
    assert flip["cpu_gap"] == right.gap[position] > 0


def test_the_earliest_flip_of_all_prompts_counts(loaded: LocalEngine) -> None:
    corpus = random_corpus()
    right = [continuation(loaded, corpus.ids[i * 40 : i * 40 + 32], 16) for i in range(2)]
    assert greedy_metrics(right, right, corpus)["greedy_match_tokens"].value == 16
    other = continuation(loaded, corpus.ids[200:232], 16)
    found = greedy_metrics(right, [right[0], other], corpus)["greedy_match_tokens"]
    flip = first_flip(right[1], other)
    assert flip is not None
    assert found.value == flip["position"] < 16
    assert [p["equal_tokens"] for p in found.details["prompts"]] == [16, flip["position"]]


def test_equal_logits_give_the_lowest_id(loaded: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = torch.zeros(1, 1, 2560)
    flat[..., [1999, 41, 300]] = 1.0
    monkeypatch.setattr(loaded, "logits", lambda *_, **__: flat)
    found = continuation(loaded, torch.tensor([1, 2]), 3)
    assert (found.ids, found.second, found.gap) == ([41] * 3, [300] * 3, [0.0] * 3)


def test_every_product_is_that_of_the_files_tensor_with_its_name(loaded: LocalEngine) -> None:
    outputs, weights = random_outputs(loaded), MODEL.state_dict()
    assert len(outputs) == 7 * LAYERS + 1
    for name, found in outputs.items():
        weight = weights[f"{name}.weight" if name == "lm_head" else f"model.{name}.weight"].double()
        rows = torch.cat([random_rows(name, n, weight.shape[1]) for n in ROWS])
        torch.testing.assert_close(found.double(), rows.double() @ weight.T, rtol=1e-4, atol=1e-4)


def test_verifying_is_not_counted_as_work(loaded: LocalEngine) -> None:
    before = loaded.counters.as_list()
    random_outputs(loaded)
    assert loaded.counters.as_list() == before


def test_rounding_stays_within_the_tolerance(folder: Path, loaded: LocalEngine) -> None:
    found = verify_metric(random_outputs(loaded), random_outputs(engine(folder, "bfloat16")), torch.bfloat16)
    assert 1e-3 < found.value < found.details["tolerance"]
    assert not found.details["above_tolerance"]


@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj", "layers.0.self_attn.v_proj", "lm_head"])
def test_a_planted_error_is_named(folder: Path, loaded: LocalEngine, name: str) -> None:
    expected = random_outputs(loaded)

    def one_output_wrong(true: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            out = true(x).clone()
            if len(x) > 1:  # only in the last row of the call that prefills
                out[-1, 11] += 0.2 * out[-1].square().mean().sqrt()
            return out

        return run

    _replace(loaded, name, one_output_wrong)
    found = verify_metric(expected, random_outputs(loaded), torch.float32)
    assert (found.details["worst"], found.details["above_tolerance"]) == (name, [name])
    assert found.value == pytest.approx(0.2, rel=0.05)


def test_an_output_that_is_not_finite_or_missing_is_refused_by_name(loaded: LocalEngine) -> None:
    right = random_outputs(loaded)
    wrong = {**right, "layers.1.self_attn.o_proj": right["layers.1.self_attn.o_proj"].clone()}
    wrong["layers.1.self_attn.o_proj"][2, 5] = float("nan")
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.o_proj: an output is not finite"):
        compare(right, wrong)
    with pytest.raises(ValueError, match="lm_head"):
        compare(right, {name: t for name, t in right.items() if name != "lm_head"})


@pytest.mark.parametrize("kind", ["attention", "mlp", "head"])
def test_time_spent_in_a_product_shows_in_its_segment(loaded: LocalEngine, kind: str) -> None:
    name = {"attention": "layers.0.self_attn.k_proj", "mlp": "layers.1.mlp.down_proj", "head": "lm_head"}[kind]
    _replace(loaded, name, _slow)
    found = gemm_share(loaded, random_corpus())
    seconds = found.details["seconds_by_phase"]["decode"]
    assert max(seconds, key=lambda segment: seconds[segment]) == kind
    assert 0.5 < found.value < 1.0


def test_time_outside_the_products_is_other(loaded: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    embed = loaded.model.embed  # type: ignore[attr-defined]
    monkeypatch.setattr(loaded.model, "embed", _slow(embed))
    assert 0.0 < gemm_share(loaded, random_corpus()).value < 0.5


def test_products_of_a_decode_step_are_its_own_launches(loaded: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where decoding multiplies several matrices at once, that operation is compared and timed, not the single matrices beside it."""
    pytest.importorskip("triton", reason="triton is not installed")
    from lab.models.transformer.step import PLAIN, TransformerStep

    plain = random_outputs(loaded)
    step = TransformerStep(loaded.model, loaded.device, loaded.dtype, PLAIN)  # type: ignore[arg-type]
    monkeypatch.setattr(loaded.graphs, "_step", step)
    assert len(decoding(loaded)) == 5 * LAYERS
    assert max(error["max"] for error in compare(plain, random_outputs(loaded)).values()) < 1e-5
    own, heads = step.layers[1].attention, loaded.model.layers[1].attention.heads
    right, width = own.project, own.block.head_dim

    def wrong(x: Tensor) -> Tensor:
        found = right(x).clone()
        found[..., heads[0] * width : (heads[0] + heads[1]) * width] *= 1.1
        return found

    monkeypatch.setattr(own, "project", wrong)
    errors = compare(plain, random_outputs(loaded))
    assert [name for name, error in errors.items() if error["max"] > 1e-3] == ["layers.1.self_attn.k_proj"]
    monkeypatch.setattr(own, "project", _slow(right))
    found = gemm_share(loaded, random_corpus())
    seconds = found.details["seconds_by_phase"]["decode"]
    assert max(seconds, key=lambda kind: seconds[kind]) == "attention" and found.details["decode"].startswith("the kernels of the captured step")


def test_the_models_operations_are_put_back(loaded: LocalEngine) -> None:
    before = [getattr(p.owner, p.attribute) for p in products(loaded.model)]
    with pytest.raises(RuntimeError, match="planted"), marked(loaded.model):
        assert all(getattr(p.owner, p.attribute) is not b for p, b in zip(products(loaded.model), before, strict=True))
        raise RuntimeError("planted")
    assert all(getattr(p.owner, p.attribute) is b for p, b in zip(products(loaded.model), before, strict=True))


def test_a_model_with_experts_is_no_business_of_these_measures() -> None:
    with pytest.raises(GapError, match="dense transformers only"):
        list(products(object()))  # type: ignore[arg-type]
