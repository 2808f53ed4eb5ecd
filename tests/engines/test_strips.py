"""The strip cache: values are the file's own, the engine keeps what the ledger predicted, and what is missing is rebuilt, counted and said."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.artifacts import Stored
from lab.capacity.build import build_of_file
from lab.cell import Cell
from lab.codecs import parts_nbytes
from lab.codecs.vqf import VQF_CODECS
from lab.compose import compose_cells
from lab.counters import Counters
from lab.engines.local import LocalEngine
from lab.engines.local_attempt import LocalAttempt
from lab.engines.strip_limits import MB, Limit, strip_limits
from lab.engines.strips import STRIP, StripCache, StripLinear, unpacked
from lab.errors import LabError
from lab.evidence import check
from lab.measure.throughput import DECODE, PREFILL
from lab.project import Project
from lab.record import Status
from tests.artifacts.vqf_files import one_thread  # noqa: F401
from tests.engines.kestrel_helpers import kestrel_project

QUANTISED = [name for name, codec in VQF_CODECS.items() if codec.block == 32]


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "mixture"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Path, str]:
    """A project, its VQF file in Q8_0 (dense) or Q4_0 (mixture) tiles, and the model's name."""
    project, file = kestrel_project(tmp_path_factory.mktemp("strips"), request.param, wmode="q4" if request.param else "q8", layout="0x3")
    return project, file, "qwen3_30b_a3b" if request.param else "qwen3_2b"


def cell_with(made: tuple[Project, Path, str], *words: str) -> Cell:
    project, _, model = made
    return compose_cells([f"model={model}", "path=kestrel_vqf", "artifact=models/m.vqf", "device=cpu", *words], project)[0]


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("shape", [(8, 256), (2, 16, 512)])
def test_a_strip_holds_the_values_of_the_blocks(name: str, shape: tuple[int, ...]) -> None:
    codec, weight = VQF_CODECS[name](), torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))
    weight[..., 1, :] *= 1e-6  # subnormal float16 scales
    parts = codec.encode(weight)
    strip = unpacked(Stored(codec, parts, shape))
    assert torch.equal(STRIP.decode(strip, shape[-1]), codec.decode(parts, shape[-1]))
    assert parts_nbytes(strip) == STRIP.nbytes(shape) == weight.numel() * 9 // 8


def test_other_encodings_have_no_strip() -> None:
    codec = VQF_CODECS["vqf:F16"]()
    with pytest.raises(LabError, match="vqf:F16: has no strip"):
        unpacked(Stored(codec, codec.encode(torch.ones(4, 32)), (4, 32)))


@pytest.mark.parametrize("word", ["placement.slots=1", "placement.slots=10", "placement.host_budget_mb=1", "placement.host_budget_mb=1000"])
def test_the_engine_keeps_and_reads_what_the_ledger_predicts(made: tuple[Project, Path, str], word: str) -> None:
    cell = cell_with(made, word)
    engine, ledger = LocalEngine(cell, made[0].root), build_of_file(cell, made[1])
    assert engine.strips is not None
    (place,), (predicted,) = engine.strips.evidence()["places"], ledger.residency
    assert (place["kept"], place["total"], place["limit"]) == (predicted.kept, predicted.total, predicted.limit)
    assert predicted.total == 21 and place["bytes"] == sum(line.bytes for line in ledger.lines if line.component == "strips")
    context = PREFILL + DECODE // 2
    state, ids = engine.new_state(1, context), torch.arange(context)[None] % 2560
    engine.logits(ids[:, :-1], state, last_only=True)
    before = engine.strips.rebuilt
    with engine.counters.span() as read:
        engine.logits(ids[:, -1:], state, last_only=True)
    assert ledger.decode_bytes_per_token.device_bytes == read.weight_bytes + engine.vector_bytes + state.read_bytes()
    assert engine.strips.rebuilt - before == predicted.total - predicted.kept
    assert ledger.flops_per_token == read.flops


def test_without_budgets_the_ledger_counts_the_file_that_the_engine_holds(made: tuple[Project, Path, str]) -> None:
    cell = cell_with(made)
    engine, ledger = LocalEngine(cell, made[0].root), build_of_file(cell, made[1])
    held, counted = dict[str, tuple[int, int]](), dict[str, tuple[int, int]]()
    for entry in engine.binder.resident():
        held[entry["component"]] = (entry["weights"], entry["bytes"])
    for line in ledger.lines:
        counted[line.component] = (line.weights, line.bytes)
    assert held == counted and engine.strips is None and ledger.residency == ()


def test_logits_are_those_of_the_file_with_and_without_room(made: tuple[Project, Path, str]) -> None:
    ids = torch.randint(0, 2560, (2, 19), generator=torch.Generator().manual_seed(3))
    plain, short, whole = (LocalEngine(cell_with(made, *words), made[0].root) for words in ([], ["placement.slots=4"], ["placement.slots=21"]))
    assert plain.strips is None and torch.equal(short.logits(ids), whole.logits(ids))
    assert float((short.logits(ids) - plain.logits(ids)).abs().max()) < 1e-5 * float(plain.logits(ids).abs().max())


def evidence_of(cell: Cell, root: Path) -> dict[str, Any]:
    """What the worker would report after one pass."""
    engine, attempt = LocalEngine(cell, root), LocalAttempt(cell, root, root, io.StringIO())
    engine.logits(torch.arange(40)[None])
    attempt._collect_evidence(engine)
    found: dict[str, Any] = attempt.result.evidence
    return found


def test_a_short_budget_is_degraded_with_n_of_m(made: tuple[Project, Path, str]) -> None:
    cell = cell_with(made, "placement.slots=15")
    found = evidence_of(cell, made[0].root)
    (status, reason), *others = check(cell, found)
    assert status is Status.DEGRADED and reason.startswith("host: 15 of 21 weights resident (no budget given, placement.slots=15); while running")
    assert "built from the file's blocks 6 times" in reason
    assert {s for s, _ in others} == {Status.DEGRADED}, "the share of resident weights, counted apart, agrees"
    found.pop("strips")
    assert check(cell, found)[0] == (Status.PATH_NOT_EXECUTED, "budgets were given, and the worker reported no strip cache on the host")


def test_enough_room_is_no_finding_and_blocks_may_not_run_instead(made: tuple[Project, Path, str]) -> None:
    cell = cell_with(made, "placement.slots=21")
    found = evidence_of(cell, made[0].root)
    assert check(cell, found) == []
    plain = evidence_of(cell_with(made), made[0].root)
    assert check(cell_with(made), plain) == [] and plain["kernels"].keys() != found["kernels"].keys()
    assert check(cell, {**plain, "strips": found["strips"], "source_codecs": found["source_codecs"]})[0][0] is Status.PATH_NOT_EXECUTED


def matrices(count: int) -> list[Stored]:
    codec, shape = VQF_CODECS["vqf:Q4_0"](), (64, 96)
    return [Stored(codec, codec.encode(torch.randn(*shape, generator=torch.Generator().manual_seed(i))), shape) for i in range(count)]


def test_with_two_memories_the_host_spares_the_rebuilding() -> None:
    sources, counters = matrices(5), Counters()
    cache = StripCache([Limit("host", None, 3), Limit("device", None, 2)], torch.device("cpu"), counters)
    strips = [cache.add(source, i, "trunk") for i, source in enumerate(sources)]
    assert [sorted(strip.at) for strip in strips] == [[], [], ["host"], ["device", "host"], ["device", "host"]]
    x = torch.randn(3, 96)
    for strip, source in zip(strips, sources, strict=True):
        assert torch.allclose(StripLinear(strip)(x), x @ source.codec.decode(source.parts, 96).T, atol=1e-5)
    assert (cache.rebuilt, cache.moved) == (2, 3)
    assert counters.totals().weight_bytes == (5 + 3) * STRIP.nbytes((64, 96)) and counters.totals().rows == 15
    assert len(cache.resident()) == 5


def test_an_entry_larger_than_the_budget_empties_the_cache() -> None:
    codec, big = VQF_CODECS["vqf:Q4_0"](), (1024, 1024)
    cache = StripCache([Limit("host", 1, None)], torch.device("cpu"), Counters())
    for source in matrices(2):
        cache.add(source, 0, "trunk")
    cache.add(Stored(codec, codec.encode(torch.ones(big)), big), 0, "trunk")
    assert STRIP.nbytes(big) > MB and not cache.held["host"]


def test_caches_need_a_vqf_path_kept_as_it_is_and_a_limit_that_counts(made: tuple[Project, Path, str]) -> None:
    assert strip_limits(cell_with(made)) == strip_limits(cell_with(made, "placement.device_budget_mb=5")) == ()
    assert strip_limits(cell_with(made, "placement.slots=5", "path.components.trunk.codec=int8_g128")) == ()
    gpu = cell_with(made, "placement.device_budget_mb=5").model_copy(update={"device": cell_with(made).device.model_copy(update={"torch_device": "cuda"})})
    assert [(limit.where, str(limit)) for limit in strip_limits(gpu)] == [("host", "no budget given"), ("device", "placement.device_budget_mb=5")]
