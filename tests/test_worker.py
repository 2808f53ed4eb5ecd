"""The worker on a tiny real checkpoint: everything measured, evidence that holds, and evidence that does not when the path is switched off."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lab.admission import decide
from lab.artifacts import Checkpoint, HfWeights
from lab.cell import BenchSpec, Cell, ComponentPlan, DeviceSpec, EvidenceRule, ModelSpec, PathSpec
from lab.codecs import create
from lab.counters import Counters
from lab.engines.local import LocalEngine
from lab.engines.local_attempt import LocalAttempt
from lab.engines.path_binder import PathBinder
from lab.errors import GapError
from lab.evidence import check
from lab.measure import throughput
from lab.measure.machine import machine_bounds
from lab.measure.throughput import CACHEABLE_BYTES, decode_bound
from lab.metrics import CORE
from lab.models.qwen4_exp.config import from_file
from lab.models.qwen4_exp.model import ModelState, Qwen4Exp
from lab.ops import Packed, PackedExperts, PackedLinear, PackedTable
from lab.record import Status, WorkerResult
from tests.models.tiny import text_ids, tiny_model, write_checkpoint

Q2 = {"experts": "q2_g32", "trunk": "int8_g128", "ple": "e4m3", "head": "int8_g128"}
SOURCE = dict.fromkeys(Q2, "source")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("root")
    write_checkpoint(folder / "tiny", tiny_model(3), "fused")
    words = ["<|endoftext|>" if i == 5 else f"w{i}" for i in sampled_text(folder / "tiny", 16, 190)]
    (folder / "text.txt").write_text(" ".join(words))
    return folder


@torch.no_grad()
def sampled_text(folder: Path, lanes: int, steps: int) -> list[int]:
    """Text the random model itself would write; on any other text it is worse than guessing, which admission refuses."""
    config = from_file(folder / "config.json")
    model = Qwen4Exp(config, PathBinder(HfWeights(Checkpoint(folder)), {}, torch.device("cpu"), torch.float32, Counters()))
    state, ids = model.new_state(lanes, steps, torch.device("cpu"), torch.float32), text_ids(lanes, 1)
    generator = torch.Generator().manual_seed(0)
    written = []
    for _ in range(steps):
        written.append(ids)
        ids = torch.multinomial(model.logits(ids, state)[:, 0].softmax(-1), 1, generator=generator)
    return torch.cat(written, 1).flatten().tolist()


def a_cell(codecs: dict[str, str], **changes: object) -> Cell:
    rules = tuple(EvidenceRule(component=c, op=codec) for c, codec in codecs.items())
    fields: dict[str, object] = {
        "model": ModelSpec(name="tiny", arch="qwen4_exp", artifact="tiny", corpus="text.txt", trained_depths=(2,)),
        "path": PathSpec(name="p", title="", components={c: ComponentPlan(codec=k) for c, k in codecs.items()}, evidence=rules, reference=codecs is SOURCE),
        "layers": 3,
        "device": DeviceSpec(name="cpu", torch_device="cpu", compute_dtype="float32", threads=1),
        "bench": BenchSpec(name="b", ppl_context=64, ppl_stride=32, ppl_windows=6, warmup=1, repeats=5, timeout_s=300),
    }
    return Cell.model_validate({**fields, **changes})


def attempt(cell: Cell, root: Path, cache: Path, decode: int = 8) -> WorkerResult:
    """One attempt in this process. Where speed is not the subject, fewer steps than the metric's name says are decoded."""
    events = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throughput, "DECODE", decode)
        LocalAttempt(cell, root, cache, events).run()
    lines = [json.loads(line) for line in events.getvalue().splitlines()]
    assert lines[-1]["event"] == "result" and {line["event"] for line in lines} <= {"phase", "metric", "result"}
    return WorkerResult.model_validate(lines[-1]["result"])


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def q2(root: Path, cache: Path) -> WorkerResult:
    return attempt(a_cell(Q2), root, cache, decode=128)


def test_every_metric_is_measured_and_admitted(q2: WorkerResult) -> None:
    decision = decide(a_cell(Q2), q2)
    assert decision.status is Status.OK, decision.reason
    # A disturbed machine may refuse single speeds; nothing may be missing without being a gap.
    assert set(decision.metrics) | set(decision.gaps) == set(CORE)
    assert decision.gaps.pop("bits_per_byte")[0] is Status.UNSUPPORTED, "the tiny tokenizer is word-level"
    assert set(decision.gaps) <= {"pp512_tok_s", "tg128_tok_s", "agg4_tg128_tok_s"}
    assert "not meaningful" in q2.notes[0]


def test_an_arm_that_differs_only_in_options_is_not_the_other_one(q2: WorkerResult) -> None:
    other = a_cell(Q2)
    plans = other.path.components | {"ple": ComponentPlan(codec="e4m3", options={"scale": "block128"})}
    other = other.model_copy(update={"path": other.path.model_copy(update={"components": plans})})
    assert check(a_cell(Q2), q2.evidence) == []
    assert check(other, q2.evidence) == [(Status.PATH_NOT_EXECUTED, "ple: e4m3 ran with scale=global, scale=block128 was asked for")]
    asked = plans | {"ple": ComponentPlan(codec="e4m3", options={"scale": "global"})}
    assert check(other.model_copy(update={"path": other.path.model_copy(update={"components": asked})}), q2.evidence) == []


def test_evidence_of_no_token_is_no_evidence(q2: WorkerResult) -> None:
    idle = {**q2.evidence, "tokens_forwarded": 0, "ops": [{**op, "rows": 0} for op in q2.evidence["ops"]]}
    assert check(a_cell(Q2), idle) == [(Status.PATH_NOT_EXECUTED, "no token went through the model")]


def test_peak_memory_is_this_process_and_not_its_parents() -> None:
    """Linux hands ru_maxrss down over fork and exec; a parent that held 300 MiB must not show in its child."""
    child = "from lab.engines.local import peak_resident_bytes; import torch; print(peak_resident_bytes())"
    parent = f"import subprocess, sys; held = bytearray(900 << 20); print(subprocess.check_output([sys.executable, '-c', {child!r}]).decode())"
    alone, beside_a_large_parent = (int(subprocess.check_output([sys.executable, "-c", code])) for code in (child, parent))
    assert beside_a_large_parent < min(900 << 20, 1.5 * alone)


def test_steps_agree_with_the_whole(q2: WorkerResult) -> None:
    parity = q2.evidence["parity"]
    assert parity["tokens"] == 64 and parity["kld_mean"] < parity["tolerance"] == 1e-6 and parity["top1_agreement"] == 1.0


def test_a_state_that_forgets_is_found_before_its_speed_is_believed(root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stepping = LocalEngine.logits

    def forgetful(self: LocalEngine, ids: Tensor, state: ModelState | None = None, last_only: bool = False) -> Tensor:
        fresh = None if state is None or ids.shape[1] > 1 else self.new_state(ids.shape[0], 1)
        return stepping(self, ids, fresh or state, last_only)

    monkeypatch.setattr(LocalEngine, "logits", forgetful)
    decision = decide(a_cell(Q2), attempt(a_cell(Q2), root, cache))
    assert decision.status is Status.PARITY_FAILED and not decision.metrics
    assert "the state kept between steps is wrong" in decision.reason and "tg128_tok_s" in decision.unadmitted


def test_details_say_how_it_was_measured(q2: WorkerResult) -> None:
    ppl = q2.metrics["ppl"]
    assert ppl.details["scored_tokens"] == 63 + 5 * 32 and ppl.details["windows"] == 6 and ppl.stderr and ppl.stderr > 0
    assert len(ppl.details["corpus"]["sha256"]) == 64
    for name, tokens in (("pp512_tok_s", 512), ("tg128_tok_s", 128), ("agg4_tg128_tok_s", 512)):
        found = q2.metrics[name]
        assert len(found.samples) == 5 and found.min == min(found.samples) and found.max == max(found.samples)
        assert found.details["realised_tokens"] == found.details["requested_tokens"] == tokens
        assert "warmed up" in found.details["cache_state"]
        # The tiny model's weights may lie in a cache, which the memory's bandwidth does not bound.
        assert (found.roofline_pct is not None and found.roofline_pct > 0) if name.startswith("pp") else found.roofline_pct is None


def test_a_decode_bound_needs_more_bytes_than_a_cache_holds_on_a_cpu() -> None:
    bounds = {"read_bytes_s": 1e10, "flops_s": 1e12}
    assert decode_bound(CACHEABLE_BYTES - 1, 1, bounds, on_cpu=True) is None
    assert decode_bound(1e9, 4, bounds, on_cpu=True) == 40.0
    assert decode_bound(1e6, 1, bounds, on_cpu=False) == 1e4
    assert decode_bound(1e9, 1, None, on_cpu=False) is None


def test_resident_bytes_are_the_codecs_own(q2: WorkerResult) -> None:
    shapes = [(8, 128, 64), (8, 64, 64)] * 3
    expected = sum(create("q2_g32").nbytes(shape) for shape in shapes)
    assert next(e for e in q2.evidence["resident"] if e["component"] == "experts")["bytes"] == expected
    assert q2.metrics["resident_bytes"].value == sum(e["bytes"] for e in q2.evidence["resident"])


def test_decode_reads_three_of_eight_experts(q2: WorkerResult) -> None:
    """Bytes per decoded token are counted per expert used, not per expert resident."""
    one = sum(create("q2_g32").nbytes(shape) for shape in ((128, 64), (64, 64)))
    by_op = {(o["layer"], o["component"]): o for o in q2.evidence["ops"]}
    assert q2.metrics["decode_bytes_per_token"].value > 3 * 3 * one
    assert q2.metrics["decode_bytes_per_token"].value < q2.metrics["resident_bytes"].value + 40_000
    assert by_op[0, "experts"]["rows"] == 2 * 3 * q2.evidence["tokens_forwarded"]
    together = q2.metrics["agg4_tg128_tok_s"].details["bytes_per_step"]
    # Four sequences share experts, so a step reads more than one sequence's weights and less than four times as much, and no weight twice.
    assert q2.metrics["tg128_tok_s"].details["bytes_per_step"] < together < 4 * q2.metrics["tg128_tok_s"].details["bytes_per_step"]


def test_reference_diverges_from_itself_by_the_noise_floor_only(root: Path, cache: Path, q2: WorkerResult) -> None:
    own = attempt(a_cell(SOURCE), root, cache)
    assert own.metrics["kld_mean"].value == pytest.approx(own.metrics["kld_mean"].details["noise_floor"])
    assert own.metrics["kld_mean"].value < 1e-6 < q2.metrics["kld_mean"].value
    assert own.gaps["expert_cosine"][0] is Status.UNSUPPORTED and "expert_cosine" not in own.metrics
    assert decide(a_cell(SOURCE), own).status is Status.OK
    assert own.metrics["ppl"].value != q2.metrics["ppl"].value


def _through_the_reference(self: PackedExperts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """What a silent fallback does: the experts computed from decoded source-precision copies."""
    plain = create("bf16")
    copies = [Packed(plain, plain.encode(s.codec.decode(s.parts, s.shape[-1])), s.shape, s.key[0], "experts", s.counters) for s in (*self.gate_up, self.down)]
    return _ORIGINAL(PackedExperts(copies[:-1], copies[-1]), x, ids, weights)


def _around_the_counters(self: PackedExperts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return torch.zeros_like(x)


def _for_few_tokens_only(self: PackedExperts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """A path that runs in decode and falls back, uncounted, in prefill."""
    return _ORIGINAL(self, x, ids, weights) if len(x) <= 4 else torch.zeros_like(x)


_ORIGINAL = PackedExperts.__call__


@pytest.mark.parametrize(
    ("replacement", "sentence"),
    [
        (_through_the_reference, "layer 0 experts: bf16 ran where only q2_g32 may"),
        (_around_the_counters, "layer 0 experts: no q2_g32 operation was counted"),
        (_for_few_tokens_only, "rows were computed where the tokens forwarded need"),
    ],
)
def test_experts_secretly_routed_elsewhere_are_not_this_path(
    root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, replacement: Callable[..., Tensor], sentence: str
) -> None:
    monkeypatch.setattr(PackedExperts, "__call__", replacement)
    decision = decide(a_cell(Q2), attempt(a_cell(Q2), root, cache))
    assert decision.status is Status.PATH_NOT_EXECUTED and sentence in decision.reason
    assert not decision.metrics and set(decision.gaps) == set(CORE) and "ppl" in decision.unadmitted


def _trunk_around_the_counters(self: PackedLinear, x: Tensor) -> Tensor:
    """A fallback in prefill only, that nothing counts."""
    (weight,) = self.blocks
    if weight.key[1] == "trunk" and x.shape[1] > 1:
        return torch.nn.functional.linear(x, weight.codec.decode(weight.parts, weight.shape[-1]))
    return _LINEAR(self, x)


_LINEAR = PackedLinear.__call__


def test_a_fallback_in_the_trunk_is_seen_too(root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedLinear, "__call__", _trunk_around_the_counters)
    decision = decide(a_cell(Q2), attempt(a_cell(Q2), root, cache))
    assert decision.status is Status.PATH_NOT_EXECUTED and "another computation took part" in decision.reason


def test_a_table_decoded_without_its_row_scale_does_not_load(root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault behind a reported perplexity of 142.6."""
    from lab.codecs.q2 import Q2Rows

    decode = Q2Rows.decode
    monkeypatch.setattr(Q2Rows, "decode", lambda self, parts, cols: decode(self, {**parts, "scale": torch.ones_like(parts["scale"])}, cols))
    result = attempt(a_cell({**Q2, "ple": "q2_rows"}), root, cache)
    assert result.status is Status.LOAD_FAILED and "ngram_embedding" in result.reason and "does not decode to its weight" in result.reason


def test_a_model_that_answers_nan_has_no_number(root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = PackedTable.__call__
    monkeypatch.setattr(PackedTable, "__call__", lambda self, ids: run(self, ids) * math.nan)
    result = attempt(a_cell(Q2), root, cache)
    assert result.gaps["ppl"][0] is Status.NUMERIC_INVALID and result.gaps["tg128_tok_s"][0] is Status.NUMERIC_INVALID
    assert "ppl" not in result.metrics and "tg128_tok_s" not in result.metrics


def test_evidence_rules_read_residency_device_and_depth(q2: WorkerResult) -> None:
    cell = a_cell(Q2)
    assert check(cell, q2.evidence) == []
    half = [{**e, "weights": e["weights"] // 2} if e["component"] == "experts" else e for e in q2.evidence["resident"]]
    assert check(cell, {**q2.evidence, "resident": half}) == [(Status.DEGRADED, "experts: 50.0% of its weights are resident as q2_g32, 100.0% are required")]
    away = [{**e, "device": "meta"} if e["component"] == "experts" else e for e in q2.evidence["resident"]]
    assert [f[0] for f in check(cell, {**q2.evidence, "resident": away})] == [Status.DEGRADED]
    assert "no such component" in check(cell, {**q2.evidence, "component_layers": {}})[0][1]
    elsewhere = [{**o, "device": "cuda"} if o["component"] == "head" else o for o in q2.evidence["ops"]]
    assert "head: ran on cuda instead of cpu" in check(cell, {**q2.evidence, "ops": elsewhere})[0][1]
    assert "2 layers ran, 3 were asked for" in check(cell, {**q2.evidence, "layers": 2})[0][1]
    assert check(cell, {})[0][0] is Status.PATH_NOT_EXECUTED
    without_rules = cell.model_copy(update={"path": cell.path.model_copy(update={"evidence": ()})})
    assert "no evidence rules" in check(without_rules, q2.evidence)[0][1]


def test_out_of_memory_is_its_own_status(root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    monkeypatch.setattr("lab.engines.local_attempt.LocalEngine", refuse)
    result = attempt(a_cell(Q2), root, cache)
    assert result.status is Status.OOM and "3 GiB" in result.reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_a_gap_and_no_crash(root: Path, cache: Path) -> None:
    device = DeviceSpec(name="cuda", torch_device="cuda", compute_dtype="bfloat16")
    result = attempt(a_cell(Q2, device=device), root, cache)
    assert result.status is Status.UNSUPPORTED and "sees 0 GPUs here" in result.reason


def test_a_device_that_is_none_is_named(root: Path, cache: Path) -> None:
    device = DeviceSpec(name="tpu", torch_device="tpu9", compute_dtype="bfloat16")
    result = attempt(a_cell(Q2, device=device), root, cache)
    assert result.status is Status.LOAD_FAILED and "device.torch_device='tpu9' is no torch device" in result.reason


def test_machine_bounds_are_measured_once_and_a_torn_file_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr("lab.measure.machine.psutil.cpu_percent", lambda interval: 100.0)
    assert machine_bounds(cpu, torch.float32, 1, tmp_path)["others_busy_cores"] > 0
    assert not list(tmp_path.glob("machine-*.json")), "bounds of a busy machine are used and not kept"
    monkeypatch.setattr("lab.measure.machine.psutil.cpu_percent", lambda interval: 0.0)
    first = machine_bounds(cpu, torch.float32, 1, tmp_path)
    assert first["read_bytes_s"] > 1e8 and first["flops_s"] > 1e8 and first["measured_at"]
    assert machine_bounds(cpu, torch.float32, 1, tmp_path) == first
    (file,) = tmp_path.glob("machine-*.json")
    file.write_text("{}")
    assert machine_bounds(cpu, torch.float32, 1, tmp_path)["measured_at"] >= first["measured_at"]
    file.unlink()
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(GapError, match="failed with exit code 1"):
        machine_bounds(cpu, torch.float32, 1, tmp_path)


@pytest.mark.parametrize(("device", "percent", "kept"), [("cpu", 40.0, False), ("cuda", 40.0, True), ("cuda", 60.0, False)])
def test_bounds_of_a_gpu_are_kept_beside_a_neighbours_cell(device: str, percent: float, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = SimpleNamespace(returncode=0, stdout='{"read_bytes_s": 1e12, "flops_s": 1e14, "bus_bytes_s": 5e10}')
    monkeypatch.setattr("lab.measure.machine.subprocess.run", lambda *_, **__: told)
    monkeypatch.setattr("lab.measure.machine.psutil.cpu_percent", lambda interval: percent)
    monkeypatch.setattr("lab.measure.machine.psutil.cpu_count", lambda: 32)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H200")
    found = machine_bounds(torch.device(device), torch.bfloat16, 1, tmp_path)
    assert bool(list(tmp_path.glob("machine-*.json"))) == kept == ("others_busy_cores" not in found)


def test_a_failed_reference_leaves_divergence_a_gap(root: Path, tmp_path: Path) -> None:
    """A cache that cannot be written (here: a file in its place) costs the divergence, nothing else."""
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    result = attempt(a_cell(Q2), root, blocked)
    assert result.status is Status.OK and result.gaps["kld_mean"][0] is Status.INFRA and "reference pass failed" in result.gaps["kld_mean"][1]
    assert "ppl" in result.metrics and "kld_mean" not in result.metrics and result.metrics["pp512_tok_s"].roofline_pct
