"""A whole attempt with the fake llama.cpp: right numbers when all is well, and for every fault the gap or the finding that is its own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lab.admission import Decision, decide
from lab.engines.llama_cpp.evidence import check
from lab.record import Status, WorkerResult
from tests.engines.fake_llama_cpp import FakeLlama, Faults
from tests.engines.llama_helpers import attempt, cell_for, install, text, write_model

SPEED = ("pp512_tok_s", "tg128_tok_s", "agg4_tg128_tok_s")


def run(root: Path, monkeypatch: pytest.MonkeyPatch, faults: Faults | None = None, **cell: Any) -> tuple[WorkerResult, Decision, FakeLlama]:
    """The worker's result, what admission makes of it, and the fake."""
    fake = FakeLlama(faults)
    install(monkeypatch, fake)
    if not (root / "model.gguf").exists():
        write_model(root)
    made = cell_for(**cell)
    result = attempt(made, root)
    return result, decide(made, result, check), fake


def expected_nll(fake: FakeLlama, windows: list[list[int]], scored_from: list[int]) -> list[float]:
    """Cross entropy by torch, token by token, of what the fake gives."""
    found = []
    for window, first in zip(windows, scored_from, strict=True):
        for t in range(first, len(window)):
            logits = torch.from_numpy(np.ascontiguousarray(fake.row(window[:t], len(window))))
            found.append(float(torch.nn.functional.cross_entropy(logits, torch.tensor(window[t]))))
    return found


def test_a_sound_run_gives_every_number_that_llama_cpp_can_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, decision, fake = run(tmp_path, monkeypatch, half=7)
    assert (decision.status, decision.reason, decision.notes, result.notes) == (Status.OK, "", [], [])
    tokens = fake.llama_model_load_from_file(str(tmp_path / "model.gguf").encode(), fake.llama_model_default_params()).tokens
    ids = [tokens.index("Ġ" if c == " " else c) for c in text()]
    windows = [ids[32 * w : 32 * w + 64] for w in range(6)]
    nll = expected_nll(fake, windows, [1] + [32] * 5)
    assert decision.metrics["ppl"].value == pytest.approx(math.exp(sum(nll) / len(nll)), rel=1e-5)
    assert decision.metrics["bits_per_byte"].value == pytest.approx(sum(nll) / math.log(2) / len(nll), rel=1e-5)
    halves = expected_nll(fake, [ids[48 * c : 48 * c + 48] for c in range(7)], [25] * 7)
    assert decision.metrics["ppl_llama_half"].value == pytest.approx(math.exp(sum(halves) / len(halves)), rel=1e-5)
    assert result.evidence["token_nll"]["nll"] == pytest.approx(halves, abs=2e-5)
    for name in SPEED:
        found = decision.metrics[name]
        assert len(found.samples) == 5
        assert found.details["realised_tokens"] == found.details["requested_tokens"] == {"pp512_tok_s": 512, "tg128_tok_s": 128, "agg4_tg128_tok_s": 512}[name]
        assert (found.details["kv_type"], found.details["flash_attention"], found.details["threads"]) == ("f16", "off", 1)
    assert decision.metrics["resident_bytes"].value == sum(t.nbytes for t in _gguf(tmp_path).tensors.values())
    assert decision.gaps.keys() == {"decode_bytes_per_token", "expert_cosine", "ple_cosine"}
    assert {status for status, _ in decision.gaps.values()} == {Status.UNSUPPORTED}
    assert result.evidence["parity"]["kld_mean"] == 0.0
    assert result.evidence["tokenization"] == {"equal": True, "ours": len(ids), "theirs": len(ids), "first_difference": None}
    assert (fake.alive, sum(fake.decoded)) == (1, result.evidence["tokens"]["evaluated"])  # 1: the load just above


def test_threads_are_tried_in_contexts_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.engines.threads.usable_cores", lambda: 4)

    def soonest(call: Any, most: int, use: Any) -> tuple[int, dict[str, float]]:
        for count in (most, most // 2):
            use(count)
            call()
        return most // 2, {str(most): 300.0, str(most // 2): 100.0}

    monkeypatch.setattr("lab.engines.threads.soonest", soonest)
    result, decision, fake = run(tmp_path, monkeypatch, threads=0)
    assert decision.status is Status.OK and result.environment["threads"] == 4
    assert result.environment["threads_used"]["prompts"] == result.environment["threads_used"]["steps"] == 2
    assert {decision.metrics[name].details["threads"] for name in SPEED} == {2} == {decision.metrics[name].details["threads_batch"] for name in SPEED}
    assert fake.alive == 0 and result.evidence["tokens"]["needed"] == result.evidence["tokens"]["evaluated"]


def _gguf(root: Path) -> Any:
    from lab.artifacts.gguf import open_gguf

    return open_gguf(root / "model.gguf")


def test_a_model_with_bos_has_it_in_the_halves_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, lies={"tokenizer.ggml.add_bos_token": True})
    result, _, fake = run(tmp_path, monkeypatch, half=4)
    assert result.evidence["model"]["bos"] == 256
    tokens = fake.llama_model_load_from_file(str(tmp_path / "model.gguf").encode(), fake.llama_model_default_params()).tokens
    ids = [256, *(tokens.index("Ġ" if c == " " else c) for c in text())]
    halves = expected_nll(fake, [[256, *ids[48 * c + 1 : 48 * c + 48]] for c in range(4)], [25] * 4)
    assert result.evidence["token_nll"]["nll"] == pytest.approx(halves, abs=2e-5)
    assert result.metrics["ppl"].details["bos"] == "none"


def test_batches_longer_than_one_go_through_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, decision, fake = run(tmp_path, monkeypatch, ppl_context=700, ppl_stride=350, ppl_windows=2)
    assert decision.status is Status.OK
    assert fake.decoded[:4] == [512, 188, 512, 188]
    assert result.metrics["ppl"].details["scored_tokens"] == 699 + 350


@pytest.mark.parametrize(
    ("faults", "status", "reason"),
    [
        (Faults(load="unknown model architecture: 'x'"), Status.LOAD_FAILED, "does not load model.gguf: llama_model_load: error loading model: unknown model"),
        (Faults(code=1), Status.CRASHED, "llama_decode returned 1 for 1 tokens (no room in the KV cache for the batch); the last message: decode: "),
        (Faults(code=-3), Status.CRASHED, "llama_decode returned -3 for 1 tokens (the computation failed)"),
        (Faults(miscount=3), Status.PATH_NOT_EXECUTED, "llama.cpp counted"),
        (Faults(vocabulary=1), Status.PATH_NOT_EXECUTED, "llama.cpp gave logits of 264 tokens, the artifact has 263"),
        (Faults(architecture="qwen3"), Status.PATH_NOT_EXECUTED, "ran the architecture qwen3, the cell is llama"),
        (Faults(other_file=True), Status.PATH_NOT_EXECUTED, "says that it loaded other.gguf, not model.gguf"),
        (Faults(silent_places=True), Status.PATH_NOT_EXECUTED, "names no device for layer 0"),
        (Faults(places={1: "CUDA0"}), Status.DEGRADED, "1 of 4 layers (the output layer counted) were on CUDA0, the cell is on cpu"),
        (Faults(wrong_batches=True), Status.PARITY_FAILED, "step by step and as a whole differ by a mean KLD"),
    ],
)
def test_a_fault_is_named(faults: Faults, status: Status, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, decision, fake = run(tmp_path, monkeypatch, faults)
    assert decision.status is status
    assert reason in decision.reason
    assert decision.metrics == {}
    assert fake.alive == 0


def test_nan_is_invalid_and_nothing_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, decision, _ = run(tmp_path, monkeypatch, Faults(nan_batches=True))
    assert {decision.gaps[name][0] for name in ("ppl", *SPEED)} == {Status.NUMERIC_INVALID}
    assert not set(SPEED) & result.metrics.keys()
    assert {"load_s", "resident_bytes", "peak_memory_bytes"} <= decision.metrics.keys()


def test_four_lanes_that_do_not_fit_cost_only_their_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, decision, _ = run(tmp_path, monkeypatch, Faults(context="failed to allocate buffer for kv cache"))
    assert decision.status is Status.OK
    assert decision.gaps["agg4_tg128_tok_s"][0] is Status.OOM
    assert "failed to allocate buffer for kv cache" in decision.gaps["agg4_tg128_tok_s"][1]
    assert {"ppl", "pp512_tok_s", "tg128_tok_s"} <= decision.metrics.keys()


def test_other_tokens_are_a_note_with_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, decision, _ = run(tmp_path, monkeypatch, Faults(other_tokens=True))
    assert decision.status is Status.OK
    assert result.evidence["tokenization"]["first_difference"] == 7
    assert "the first difference at 7" in result.notes[0]


def test_a_text_too_short_for_halves_costs_only_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, decision, _ = run(tmp_path, monkeypatch, half=4, llama_half_context=2000)
    assert decision.gaps["ppl_llama_half"][0] is Status.UNSUPPORTED
    assert "llama_half_context=2000" in decision.gaps["ppl_llama_half"][1]
    assert decision.status is Status.OK


def test_a_gpu_cell_needs_a_gpu_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, decision, fake = run(tmp_path, monkeypatch, device="cuda")
    assert decision.status is Status.UNSUPPORTED
    assert "built without a GPU backend" in decision.reason
    assert fake.decoded == []


def test_a_gpu_cell_with_all_layers_there_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, decision, _ = run(tmp_path, monkeypatch, Faults(gpu=True), device="cuda")
    assert (decision.status, decision.reason) == (Status.OK, "")
    assert decision.metrics["peak_memory_bytes"].value == (2 + 4) * 2**20  # weights, and the KV cache of four lanes


def test_a_cpu_cell_leaves_the_gpu_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, decision, _ = run(tmp_path, monkeypatch, Faults(gpu=True))
    assert decision.status is Status.OK


@pytest.mark.parametrize(("there", "status"), [(0, Status.PATH_NOT_EXECUTED), (2, Status.DEGRADED)])
def test_layers_of_a_gpu_cell_on_the_cpu_are_found(there: int, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = Faults(gpu=True, places={layer: "CPU" for layer in range(there, 4)})
    _, decision, _ = run(tmp_path, monkeypatch, faults, device="cuda")
    assert decision.status is status
    assert f"{4 - there} of 4 layers" in decision.reason


def test_a_smaller_depth_is_a_gap_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, decision, fake = run(tmp_path, monkeypatch, layers=2)
    assert decision.status is Status.UNSUPPORTED
    assert "layers=2: llama.cpp has no switch for a smaller depth; use layers=3" in decision.reason
    assert fake.decoded == []


def test_without_the_package_the_gap_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("lab.engines.llama_cpp.library.import_module", without)
    write_model(tmp_path)
    result = attempt(cell_for(), tmp_path)
    assert result.status is Status.UNSUPPORTED
    assert "pip install 'migration-lab[llama]'" in result.reason


def test_a_file_that_changed_after_its_digest_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lab.artifacts import open_artifact

    def touched(path: Path, arch: str) -> Any:
        found = open_artifact(path, arch)
        (tmp_path / "new").write_bytes(path.read_bytes())
        (tmp_path / "new").replace(path)
        return found

    monkeypatch.setattr("lab.engines.llama_cpp.attempt.open_artifact", touched)
    _, decision, _ = run(tmp_path, monkeypatch)
    assert decision.status is Status.PATH_NOT_EXECUTED
    assert "model.gguf changed between its digest" in decision.reason
