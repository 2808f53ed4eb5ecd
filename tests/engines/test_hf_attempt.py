"""engine=transformers on tiny checkpoints: its numbers beside the lab's engine, its own errors as gaps, and evidence that fires where less ran."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lab.admission import decide
from lab.artifacts import load_tokenizer
from lab.engines.hf import library
from lab.engines.hf.engine import HfEngine
from lab.engines.hf.evidence import check
from lab.engines.local import LocalEngine
from lab.errors import GapError
from lab.measure.perplexity import PerplexityTally
from lab.measure.scoring import score_windows
from lab.measure.text import load_corpus
from lab.models import inventory
from lab.record import Status, WorkerResult
from tests.engines.hf_helpers import attempt, cell_for, checkpoint
from tests.models.transformers_tiny import one_thread  # noqa: F401

SPEEDS = ("pp512_tok_s", "tg128_tok_s", "agg4_tg128_tok_s")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """qwen4_exp of four layers, one of them with attention."""
    return checkpoint(tmp_path_factory.mktemp("four"), "qwen4_exp")


@pytest.fixture(scope="module")
def found(folder: Path) -> WorkerResult:
    with pytest.MonkeyPatch.context() as patch:
        return attempt(cell_for(folder, "qwen4_exp", 4), folder, patch)


def test_every_number_is_measured_and_the_model_is_the_lab_engines(folder: Path, found: WorkerResult) -> None:
    cell = cell_for(folder, "qwen4_exp", 4)
    decision = decide(cell, found)
    assert decision.status is Status.OK, decision.reason
    assert {"kld_mean", "load_s", "resident_bytes", "decode_bytes_per_token", *SPEEDS} <= decision.metrics.keys()
    assert decision.gaps["ppl"][0] is Status.IMPLAUSIBLE  # random weights: worse than guessing
    assert decision.metrics["kld_mean"].value < 1e-9
    assert decision.metrics["top1_agreement"].value == 1
    assert found.evidence["parity"]["kld_mean"] < 1e-9
    for name, tokens in zip(SPEEDS, (24, 6, 24), strict=True):
        assert decision.metrics[name].details["realised_tokens"] == tokens
        assert (decision.metrics[name].roofline_pct or 0) > 0 or name != "pp512_tok_s"
    assert found.evidence["fed"] == found.evidence["tokens_forwarded"] > 0
    assert found.evidence["transformers"]["experts"] == {"prompts": "grouped_mm", "steps": "grouped_mm"}
    assert any("grouped_mm" in note for note in found.notes)


def test_threads_are_tried_and_counted_for_no_token(folder: Path, found: WorkerResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.engines.threads.usable_cores", lambda: 2)
    cell = cell_for(folder, "qwen4_exp", 4)
    with pytest.MonkeyPatch.context() as patch:
        tried = attempt(cell.model_copy(update={"device": cell.device.model_copy(update={"threads": 0})}), folder, patch)
    used = tried.environment["threads_used"]
    assert used["of"] == 2 and set(used["tried_ms"]["prompts"]) == {"2", "1"} and "threads_used" not in found.environment
    assert decide(cell, tried).status is Status.OK and tried.evidence["fed"] == found.evidence["fed"]


def test_perplexity_is_the_lab_engines(folder: Path, found: WorkerResult) -> None:
    """The same windows, each token scored once, by the other engine."""
    cell = cell_for(folder, "qwen4_exp", 4, engine="local")
    corpus = load_corpus(load_tokenizer(folder), folder / "text.txt")
    tally = PerplexityTally(None)
    windows, scored = corpus.windows(cell.bench.ppl_context, cell.bench.ppl_stride, cell.bench.ppl_windows)
    for batch in score_windows(LocalEngine(cell, folder).scores, windows, scored, 2):
        tally.add(*batch)
    theirs, ours = found.metrics["ppl"], tally.metrics({})["ppl"]
    assert theirs.value == pytest.approx(ours.value, rel=1e-5)
    assert theirs.details["scored_tokens"] == ours.details["scored_tokens"] > 100


def test_without_an_attention_layer_its_cache_is_a_gap_and_its_scores_stand(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = cell_for(folder, "qwen4_exp", 3)
    result = attempt(cell, tmp_path, monkeypatch)
    decision = decide(cell, result)
    assert decision.status is Status.OK, decision.reason
    assert decision.metrics["kld_mean"].value < 1e-9
    for name in (*SPEEDS, "decode_bytes_per_token"):
        status, reason = decision.gaps[name]
        assert status is Status.UNSUPPORTED
        assert "get_seq_length" in reason and "ValueError" in reason and "\n" not in reason
    assert "parity" not in result.evidence


@pytest.mark.parametrize("arch", ["llama", "qwen3", "qwen3_moe"])
def test_plain_transformers_give_the_lab_engines_logits_whole_and_stepwise(arch: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, arch)
    cell = cell_for(tmp_path, arch, 2)
    theirs, ours = HfEngine(cell, tmp_path), LocalEngine(cell, tmp_path)
    if theirs.parts.experts:  # torch's grouped product wants rows of 16 bytes, which these experts have not
        with pytest.raises(GapError, match="RuntimeError: strides should be multiple of 16 bytes"):
            theirs.logits(torch.tensor([[7]]))
        assert theirs.fed == theirs.counters.rows("embed") == 0
        theirs.experts = dict.fromkeys(theirs.experts, "eager")
    ids = torch.randint(6, 90, (2, 15), generator=torch.Generator().manual_seed(3))
    want, state = ours.logits(ids), theirs.new_state(2, 15)
    steps = [theirs.logits(ids[:, :9], state), *(theirs.logits(ids[:, t : t + 1], state, last_only=True) for t in range(9, 15))]
    torch.testing.assert_close(theirs.scores(ids), want, atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.cat(steps, 1), want, atol=1e-4, rtol=0)
    held = {part["component"]: part["weights"] for part in theirs.parts.held()}
    sizes = inventory(ours.config).weights()
    assert {c: held.get(c, 0) for c in ("experts", "ple", "head", "embed")} == {c: sizes.get(c, 0) for c in ("experts", "ple", "head", "embed")}
    config = theirs.model.config
    kept = 2 * 2 * 15 * 2 * config.num_key_value_heads * config.head_dim * 4  # keys and values, layers, tokens, sequences, float32
    assert state.length == 15 and state.nbytes() == kept


def test_a_skipped_layer_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lie: transformers is told after loading to run fewer layers than it holds."""
    real = HfEngine.__init__

    def shallow(self: HfEngine, *args: Any) -> None:
        real(self, *args)
        self.model.config.num_hidden_layers = 2

    monkeypatch.setattr(HfEngine, "__init__", shallow)
    cell = cell_for(folder, "qwen4_exp", 4)
    result = attempt(cell, folder, monkeypatch)
    decision = decide(cell, result)
    assert decision.status is Status.PATH_NOT_EXECUTED
    assert "layer 2 trunk: 0 rows" in decision.reason
    assert not decision.metrics


LIES = {
    "another class": (lambda e: e["transformers"].update({"class": "my.models.qwen4_exp.Qwen4ExpForCausalLM"}), "which is not transformers' qwen4_exp"),
    "fewer layers": (lambda e: e.update(depth=3), "3 layers were loaded, 4 were asked for"),
    "another table": (lambda e: next(p for p in e["parts"] if p["component"] == "ple").update(weights=7), "ple: transformers holds 7 weights"),
    "no experts": (lambda e: e.update(parts=[p for p in e["parts"] if p["component"] != "experts"]), "experts: transformers holds 0 weights"),
    "a token more": (lambda e: e.update(fed=e["fed"] + 1), "rows were counted where the"),
    "experts missed one": (lambda e: next(o for o in e["ops"] if o["component"] == "experts").update(rows=1), "layer 0 experts: 1 rows"),
    "nothing ran": (lambda e: e.update(fed=0), "no token went through"),
    "another precision": (lambda e: e["parts"][0].update(dtype="float16"), "weights are not in float32: embed in float16"),
    "nothing said": (lambda e: e.pop("ops"), "the worker reported no ops"),
}


@pytest.mark.parametrize("lie", sorted(LIES))
def test_each_lie_is_seen(lie: str, folder: Path, found: WorkerResult) -> None:
    cell, told = cell_for(folder, "qwen4_exp", 4), copy.deepcopy(found.evidence)
    assert check(cell, told) == []
    LIES[lie][0](told)
    status, reason = check(cell, told)[0]
    assert status is Status.PATH_NOT_EXECUTED and LIES[lie][1] in reason


def test_weights_elsewhere_degrade_the_cell(folder: Path, found: WorkerResult) -> None:
    told = copy.deepcopy(found.evidence)
    told["parts"][0]["device"] = "meta"
    assert check(cell_for(folder, "qwen4_exp", 4), told) == [(Status.DEGRADED, "weights are not on cpu: embed on meta")]


@pytest.mark.parametrize("change", ["missing", "unread"])
def test_files_that_are_not_the_whole_model_do_not_load(change: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    if change == "missing":
        tensors.pop("model.norm.weight")
    else:
        tensors["model.layers.0.other.weight"] = torch.ones(3)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(GapError, match="did not find 1 weights" if change == "missing" else "left 1 weights of the files unread") as raised:
        HfEngine(cell_for(folder, "llama", 2), tmp_path)
    assert raised.value.status is Status.LOAD_FAILED


def test_a_synthetic_model_has_the_sizes_and_the_table_asked_for(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "sizes", "qwen4_exp")
    cell = cell_for(folder, "qwen4_exp", 4, artifact="synthetic", geometry=str(folder / "config.json"), table_rows=64)
    engine = HfEngine(cell, tmp_path)
    held = {part["component"]: part["weights"] for part in engine.parts.held()}
    table = next(iter(engine.parts.tables.values()))
    assert 64 <= len(table.weight) < 96
    assert held["ple"] == table.weight.numel()
    logits = engine.logits(torch.arange(6, 40)[None])
    assert bool(torch.isfinite(logits).all()) and float(logits.std()) > 0


def test_a_missing_package_is_a_gap_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(library, "import_module", gone)
    with pytest.raises(GapError, match=r"needs transformers: pip install 'migration-lab\[transformers\]'") as raised:
        library.library()
    assert raised.value.status is Status.UNSUPPORTED


def test_an_old_version_without_the_class_is_a_gap() -> None:
    class Old:
        __version__ = "4.0"

    with pytest.raises(GapError, match="4.0 has no working Qwen4ExpForCausalLM"):
        library.model_class(Old(), "qwen4_exp")
