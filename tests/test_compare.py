"""The verb compare: words where samples support them, refusals where two attempts cannot be set against each other."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from lab.cell import Cell
from lab.compare import Line, compare_command, compare_records
from lab.errors import LabError
from lab.likeness import beside
from lab.metrics import METRICS
from lab.project import Project
from lab.record import Gap, Measurement, Record, Status
from lab.stats import NOT_SEPARATED, Comparison, Difference
from lab.store import Store
from tests.matrix_helpers import PROVENANCE, cell, complete, invalidated, keep, measured, project_at, record

FINE, COARSE = cell("fine"), cell("coarse")


def line(a: Record, b: Record, metric: str) -> Line:
    return next(one for one in compare_records(a, b) if one.metric == metric)


def with_ppl(value: float, stderr: float | None = 0.05, of: Any = COARSE, **rest: Any) -> Record:
    return record(of, {"ppl": measured("ppl", value, stderr=stderr, **rest), "load_s": Measurement(value=value, unit="s", protocol="load@1")})


@pytest.mark.parametrize(("speed", "word"), [(120.0, "faster"), (80.0, "slower"), (101.0, NOT_SEPARATED)])
def test_speeds_need_samples_that_lie_apart(speed: float, word: str) -> None:
    found = line(complete(FINE, 0.1, speed), complete(COARSE, 0.1, 100.0), "pp512_tok_s")
    assert found.word == word and isinstance(found.found, Comparison)
    assert (found.a, found.b) == (speed, 100.0) and found.found.ratio == pytest.approx(speed / 100)


@pytest.mark.parametrize(("value", "word"), [(20.0, "better"), (24.0, "worse"), (22.1, NOT_SEPARATED)])
def test_quality_is_judged_by_standard_errors_and_its_direction(value: float, word: str) -> None:
    found = line(with_ppl(value, of=FINE), with_ppl(22.0), "ppl")
    assert found.word == word and isinstance(found.found, Difference) and found.found.difference == pytest.approx(value - 22.0)


def test_a_metric_where_higher_is_better_turns_the_word(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = [record(of, {"top1_agreement": measured("top1_agreement", value, stderr=0.001)}) for of, value in ((FINE, 0.9), (COARSE, 0.8))]
    assert line(pair[0], pair[1], "top1_agreement").word == "better"
    multiples = [
        record(of, {"decode_multiple": Measurement.from_samples([value + i / 100 for i in range(5)], "x", "multiple@2")})
        for of, value in ((FINE, 2.0), (COARSE, 3.0))
    ]
    assert line(multiples[0], multiples[1], "decode_multiple").word == "worse"


def test_single_values_are_shown_and_not_judged() -> None:
    found = line(with_ppl(20.0, of=FINE), with_ppl(22.0), "load_s")
    assert (found.a, found.b, found.word, found.found) == (20.0, 22.0, "not judged", None) and "one value each" in found.why
    assert line(with_ppl(20.0, None, of=FINE), with_ppl(22.0), "ppl").word == "not judged"


def test_too_few_samples_say_so() -> None:
    def few(of: Any, speed: float) -> Record:
        return record(of, {"decode_multiple": Measurement.from_samples([speed, speed + 1, speed + 2], "x", "multiple@2")})

    found = line(few(FINE, 500.0), few(COARSE, 100.0), "decode_multiple")
    assert found.word == NOT_SEPARATED and "3 against 3 samples reach p = 0.1 at best" in found.why


DEVICE = FINE.device
OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"device": DEVICE.model_copy(update={"name": "h200"})}, "device.name differs: cpu and h200"),
    ({"device": DEVICE.model_copy(update={"torch_device": "cuda"})}, "device.torch_device differs: cpu and cuda"),
    ({"device": DEVICE.model_copy(update={"compute_dtype": "bfloat16"})}, "device.compute_dtype differs"),
    ({"bench": FINE.bench.model_copy(update={"repeats": 9})}, "bench.repeats differs: 5 and 9"),
]


@pytest.mark.parametrize(("changed", "message"), OTHERS)
def test_another_device_or_bench_refuses_the_whole(changed: dict[str, Any], message: str) -> None:
    other = COARSE.model_copy(update=changed)
    b = complete(COARSE, 0.1).model_copy(update={"cell": other.model_dump(mode="json")})
    with pytest.raises(LabError, match=re.escape(f"not compared: {message}")):
        compare_records(complete(FINE, 0.1), b)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"machine": {**PROVENANCE["machine"], "cpu": "Other CPU"}}, "machine.cpu differs: Bench CPU and Other CPU"),
        ({"machine": None}, "machine.cpu differs: Bench CPU and not recorded; machine.cores differs: 2 and not recorded"),
        ({"packages": {"torch": "2.10.0"}}, "torch differs: 2.9.0 and 2.10.0"),
    ],
)
def test_another_machine_or_torch_refuses_what_is_timed_and_not_the_quality(made: dict[str, Any], message: str) -> None:
    a, b = complete(FINE, 0.1, 200.0), complete(COARSE, 0.3, provenance={**PROVENANCE, **made})
    found = line(a, b, "pp512_tok_s")
    assert (found.refused, found.word, found.found) == (message, "", None)
    assert line(a, b, "kld_mean").word == "better"
    assert message.split("; ", maxsplit=1)[0] in map(str, beside(a, b)), "beside the quality it is said"


def test_what_moves_no_number_does_not_refuse() -> None:
    bench = COARSE.bench.model_copy(update={"timeout_s": 999.0, "name": "standard_slow"})
    b = complete(COARSE, 0.1).model_copy(update={"cell": COARSE.model_copy(update={"bench": bench}).model_dump(mode="json")})
    assert line(complete(FINE, 0.1), b, "ppl").refused == ""


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"protocol": "ppl/window@0"}, "protocol differs: ppl/window@1 and ppl/window@0"),
        ({"unit": "bit/B"}, "unit differs: ppl and bit/B"),
        ({"details": {"cache_state": "cold"}}, "cache_state differs: not recorded and cold"),
        ({"details": {"corpus_sha256": "other"}}, "corpus_sha256 differs: not recorded and other"),
    ],
)
def test_another_protocol_unit_cache_state_or_text_refuses_the_metric(changed: dict[str, Any], message: str) -> None:
    b = with_ppl(22.0).model_copy(update={"metrics": {**with_ppl(22.0).metrics, "ppl": measured("ppl", 22.0, stderr=0.05, **changed)}})
    found = line(with_ppl(20.0, of=FINE), b, "ppl")
    assert (found.refused, found.word, found.found) == (message, "", None)
    assert line(with_ppl(20.0, of=FINE), b, "load_s").refused == ""


def test_a_gap_is_told_with_its_reason_and_never_compared() -> None:
    gap = {"pp512_tok_s": Gap(status=Status.IMPLAUSIBLE, reason="above the bound", fill="x")}
    cosine = {"expert_cosine": measured("expert_cosine", 0.9)}
    found = line(complete(FINE, 0.1), record(COARSE, cosine, gaps=gap), "pp512_tok_s")
    assert (found.b, found.refused) == (None, "B has a gap: IMPLAUSIBLE: above the bound")
    assert line(complete(FINE, 0.1), record(COARSE, cosine), "kld_mean").refused == "B did not measure it"


def test_where_no_metric_can_be_compared_the_command_fails() -> None:
    with pytest.raises(LabError, match="not compared: ppl: B did not measure it; kld_mean: A did not measure it"):
        compare_records(record(FINE, {"ppl": measured("ppl", 2.0)}), record(COARSE, {"kld_mean": measured("kld_mean", 0.1)}))
    with pytest.raises(LabError, match="A and B are the same attempt"):
        compare_records(complete(FINE, 0.1), complete(FINE, 0.1).model_copy(update={"attempt": 7}))


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = project_at(tmp_path)
    code = {**PROVENANCE, "code_sha256": "beef" * 16}
    keep(made, complete(FINE, 0.1, 120.0, attempt=1), complete(FINE, 0.1, 90.0, attempt=2), record(FINE, status=Status.OOM, reason="no memory", attempt=3))
    keep(made, complete(COARSE, 0.3, 100.0, attempt=4, provenance=code))
    return made


def told(project: Project, *words: str) -> str:
    out = io.StringIO()
    assert compare_command(project, words, out) == 0
    return out.getvalue()


def test_the_table_names_both_attempts_values_and_what_else_differs(project: Project) -> None:
    shown = told(project, f"{FINE.id}/1", COARSE.id)
    for text in (f"A  {FINE.id}/001", f"B  {COARSE.id}/001", "faster", "better", "x1.200 (", "note: code differs: c0dec0dec0de and beefbeefbeef", "0.0079"):
        assert text in shown
    assert "slower" in told(project, FINE.id, COARSE.id), "the newest OK attempt is the second"
    Store(project.runs).mark(project.runs / FINE.id / "002", [invalidated()])
    assert "faster" in told(project, FINE.id, COARSE.id), "an invalidated one is passed over"


def test_the_json_document_holds_every_metric_and_no_filler(project: Project) -> None:
    found = json.loads(told(project, f"{FINE.id}/1", COARSE.id, "--json"))
    assert found["a"]["attempt"] == f"{FINE.id}/001" and found["alpha"] == 0.01
    by_name = {one["metric"]: one for one in found["metrics"]}
    assert by_name["pp512_tok_s"]["word"] == "faster" and by_name["pp512_tok_s"]["found"]["p"] < 0.01
    assert by_name["expert_cosine"]["found"] is None and list(by_name) == [name for name in METRICS if name in by_name]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "name two attempts; usage: python -m lab compare A B [--json]"),
        ((FINE.id,), "name two attempts"),
        ((FINE.id, COARSE.id, "--all"), "name two attempts"),
        ((FINE.id, "nothing"), "nothing: neither a cell in runs nor a record file"),
        ((f"{FINE.id}/3", COARSE.id), f"{FINE.id}/3 ({FINE.id}/003): OOM: no memory; only an OK attempt has numbers to compare"),
        ((FINE.id, f"{FINE.id}/002"), "A and B are the same attempt"),
    ],
)
def test_a_wrong_comparison_is_one_line(project: Project, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(LabError, match=re.escape(message)):
        compare_command(project, words, io.StringIO())


def test_an_invalidated_attempt_is_not_compared(project: Project) -> None:
    Store(project.runs).mark(project.runs / FINE.id / "001", [invalidated("wrong text")])
    with pytest.raises(LabError, match="INVALIDATED: wrong text; there is nothing to compare"):
        compare_command(project, [f"{FINE.id}/001", COARSE.id], io.StringIO())


def stale(of: Cell, attempt: int) -> Record:
    """Complete, but its perplexity is of an older protocol; started later than the others."""
    made = complete(of, 0.1, 300.0, attempt=attempt)
    return made.model_copy(update={"metrics": {**made.metrics, "ppl": measured("ppl", 20.0, protocol="ppl/window@0")}})


def test_an_attempt_under_an_older_protocol_is_refused_and_never_chosen(project: Project) -> None:
    keep(project, stale(FINE, 8), stale(COARSE, 9))
    with pytest.raises(LabError, match=r"STALE_PROTOCOL: attempt 4 measured ppl under ppl/window@0.*; there is nothing to compare"):
        compare_command(project, [f"{FINE.id}/004", f"{COARSE.id}/002"], io.StringIO())
    assert f"A  {FINE.id}/002" in told(project, FINE.id, COARSE.id)
    for number in ("001", "002"):
        Store(project.runs).mark(project.runs / FINE.id / number, [invalidated()])
    with pytest.raises(LabError, match=f"{FINE.id}: no OK attempt under today's protocols; attempt 4 measured ppl under ppl/window@0"):
        compare_command(project, [FINE.id, COARSE.id], io.StringIO())


def test_a_pair_that_the_rules_doubt_gets_no_word(project: Project) -> None:
    deeper = cell("coarse", 6)
    keep(project, complete(deeper, 0.3, 150.0))
    found = {one["metric"]: one for one in json.loads(told(project, deeper.id, COARSE.id, "--json"))["metrics"]}
    assert (found["pp512_tok_s"]["word"], found["pp512_tok_s"]["found"]) == ("", None)
    assert found["pp512_tok_s"]["refused"].startswith(
        "IMPLAUSIBLE: PP, nano coarse on cpu, bench standard: 150 tok/s at 6 layers is faster than 100 tok/s at 3"
    )
    assert found["kld_mean"]["word"] != "" and found["kld_mean"]["refused"] == ""


def test_the_environment_and_a_warning_on_one_side_are_noted(project: Project) -> None:
    state = {"before": {"cpu_clocks": {"state": "warn", "found": "governor powersave"}, "swap": {"state": "ok", "found": "none"}}, "after": {}}
    calm = {"before": {"cpu_clocks": {"state": "ok", "found": "performance"}}}
    keep(project, complete(FINE, 0.1, attempt=7, provenance={**PROVENANCE, "env": {"OMP_NUM_THREADS": "1"}, "machine_state": state}))
    keep(project, complete(COARSE, 0.1, attempt=8, provenance={**PROVENANCE, "env": {}, "machine_state": calm}))
    notes = json.loads(told(project, FINE.id, COARSE.id, "--json"))["notes"]
    assert notes == ["env.OMP_NUM_THREADS differs: 1 and not recorded", "machine_state.cpu_clocks differs: governor powersave and no warning"]
    assert all(f"note: {note}" in told(project, FINE.id, COARSE.id) for note in notes)


def test_a_number_that_todays_rules_refuse_gets_no_word_and_doubts_no_other(project: Project) -> None:
    frozen = complete(cell("coarse", 6), 0.3, 150.0)
    frozen = frozen.model_copy(update={"metrics": {**frozen.metrics, "pp512_tok_s": measured("pp512_tok_s", 150.0, spread=0.0)}})
    found = {one.metric: one for one in compare_records(frozen, complete(COARSE, 0.1))}
    assert found["pp512_tok_s"].refused.startswith("A is IMPLAUSIBLE: ") and "is faster than" not in found["pp512_tok_s"].refused
    assert found["kld_mean"].word == "worse"


def test_a_reason_with_brackets_is_shown_as_it_is(project: Project) -> None:
    cosine, gap = {"expert_cosine": measured("expert_cosine", 0.9)}, {"ppl": Gap(status=Status.CRASHED, reason="exit [/red]", fill="x")}
    keep(project, record(COARSE, cosine, gaps=gap, attempt=9))
    assert "CRASHED: exit [/red]" in told(project, FINE.id, COARSE.id)
