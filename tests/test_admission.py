"""Each rule of admission fires on the finding it is for, and on nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lab.admission import Decision, decide
from lab.cell import Cell
from lab.gates import GATES
from lab.metrics import CORE
from lab.placement.checks import shares_slots
from lab.record import Measurement, Status, WorkerResult
from tests.runner_helpers import cell_of, make_project

GOOD = [50.0, 51.0, 49.0, 50.5, 49.5]


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    folder: Path = tmp_path_factory.mktemp("project")
    return cell_of(make_project(folder / "p"), "path=expert_q2", "layers=3")


def rate(samples: list[float], protocol: str = "tg@1", **rest: Any) -> Measurement:
    return Measurement.from_samples(samples, "tok/s", protocol, **rest)


def judge(cell: Cell, findings: list[tuple[Status, str]] | None = None, **changes: Any) -> Decision:
    metrics = {"ppl": Measurement(value=9.5, unit="ppl", protocol="ppl/window@1"), "tg128_tok_s": rate(GOOD)}
    result = {"status": Status.OK, "metrics": metrics, "evidence": {"vocab_size": 4096}} | changes
    return decide(cell, WorkerResult.model_validate(result), lambda *_: findings or [])


def test_good_findings_are_admitted_and_the_rest_is_a_gap(cell: Cell) -> None:
    decision = judge(cell, gaps={"kld_mean": (Status.NOT_RUN, "no reference")})
    assert decision.status is Status.OK
    assert set(decision.metrics) == {"ppl", "tg128_tok_s"}
    assert decision.gaps["kld_mean"] == (Status.NOT_RUN, "no reference")
    assert decision.gaps["load_s"][0] is Status.NOT_RUN
    assert decision.metrics.keys() | decision.gaps.keys() == set(CORE)


def test_a_worker_that_failed_admits_nothing(cell: Cell) -> None:
    decision = judge(cell, status=Status.OOM, reason="too big")
    assert (decision.status, decision.reason, decision.metrics) == (Status.OOM, "too big", {})
    assert set(decision.gaps) == set(CORE)
    assert set(decision.unadmitted) == {"ppl", "tg128_tok_s"}


def test_the_first_evidence_finding_decides_and_the_others_are_noted(cell: Cell) -> None:
    findings = [(Status.PATH_NOT_EXECUTED, "experts ran bf16"), (Status.DEGRADED, "half is resident")]
    decision = judge(cell, findings)
    assert (decision.status, decision.reason) == findings[0]
    assert decision.notes == ["DEGRADED: half is resident"]
    assert not decision.metrics
    assert decision.unadmitted["tg128_tok_s"].samples == GOOD


REFUSED = [
    ("ppl", Measurement(value=0.5, unit="ppl", protocol="ppl/window@1"), Status.NUMERIC_INVALID, "impossible"),
    ("ppl", Measurement(value=5000, unit="ppl", protocol="ppl/window@1"), Status.IMPLAUSIBLE, "vocabulary size 4096"),
    ("ppl", Measurement(value=9.5, unit="ppl", protocol="ppl/window@0"), Status.NUMERIC_INVALID, "ppl/window@0"),
    ("kld_mean", Measurement(value=-0.1, unit="nat", protocol="kld@1"), Status.NUMERIC_INVALID, "impossible"),
    ("top1_agreement", Measurement(value=1.1, unit="fraction", protocol="kld@1"), Status.NUMERIC_INVALID, "0 to 1"),
    ("expert_cosine", Measurement(value=-1.1, unit="cosine", protocol="weight-cosine@1"), Status.NUMERIC_INVALID, "impossible"),
    ("pp512_tok_s", rate([*GOOD[:4], -1.0], "pp@1"), Status.NUMERIC_INVALID, "impossible"),
    ("pp512_tok_s", Measurement(value=500, unit="samples/s", protocol="pp@1"), Status.NUMERIC_INVALID, "samples/s"),
    ("tg128_tok_s", rate(GOOD, roofline_pct=106.0), Status.IMPLAUSIBLE, "106.0 % of the physical bound"),
    ("tg128_tok_s", rate([50.0] * 5), Status.IMPLAUSIBLE, "without any spread"),
    ("tg128_tok_s", rate([0.0, 0.0]), Status.IMPLAUSIBLE, "zero"),
    ("tg128_tok_s", rate(GOOD[:4]), Status.NUMERIC_INVALID, "4 samples, at least 5"),
    ("tg128_tok_s", Measurement(value=50, unit="tok/s", protocol="tg@1"), Status.NUMERIC_INVALID, "0 samples, at least 5"),
    ("resident_bytes", Measurement(value=0, unit="B", protocol="resident@1"), Status.IMPLAUSIBLE, "zero"),
    ("peak_memory_bytes", Measurement(value=0, unit="B", protocol="peak@1"), Status.IMPLAUSIBLE, "zero"),
    ("decode_bytes_per_token", Measurement(value=0, unit="B", protocol="counted@1"), Status.IMPLAUSIBLE, "zero"),
    ("tg128_tok_s", rate(GOOD, details={"requested_tokens": 128, "realised_tokens": 1}), Status.IMPLAUSIBLE, "1 tokens .* 128"),
    ("tg128_tok_s", rate(GOOD, details={"requested_tokens": 128}), Status.IMPLAUSIBLE, "None tokens .* 128"),
    ("agg4_tg128_tok_s", rate([40.0, 41.0, 39.0, 40.5, 39.5], "agg@1"), Status.IMPLAUSIBLE, "slower than one alone"),
]


@pytest.mark.parametrize(("name", "found", "status", "reason"), REFUSED, ids=[f"{n}-{r}" for n, _, _, r in REFUSED])
def test_a_metric_that_cannot_be_right_becomes_a_gap_alone(cell: Cell, name: str, found: Measurement, status: Status, reason: str) -> None:
    metrics = {"ppl": Measurement(value=9.5, unit="ppl", protocol="ppl/window@1"), "tg128_tok_s": rate(GOOD)}
    metrics["load_s"] = Measurement(value=2.5, unit="s", protocol="load@1")
    other = "load_s" if name == "ppl" else "ppl"
    decision = judge(cell, metrics=metrics | {name: found})
    assert decision.status is Status.OK
    assert other in decision.metrics
    assert name not in decision.metrics
    assert decision.gaps[name][0] is status
    assert re.search(reason, decision.gaps[name][1])
    assert decision.unadmitted[name] == found


ADMITTED = [
    ("tg128_tok_s", rate(GOOD, roofline_pct=104.0)),
    ("tg128_tok_s", rate([50.0, 50.0, 50.0, 50.0, 50.001])),
    ("tg128_tok_s", rate(GOOD, details={"requested_tokens": 128, "realised_tokens": 128})),
    ("agg4_tg128_tok_s", rate(GOOD, "agg@1")),
    ("top1_agreement", Measurement(value=1.0, unit="fraction", protocol="kld@1")),
    ("expert_cosine", Measurement(value=1.0 + 1e-7, unit="cosine", protocol="weight-cosine@1")),
    ("kld_mean", Measurement(value=0.0, unit="nat", protocol="kld@1")),
]


@pytest.mark.parametrize(("name", "found"), ADMITTED, ids=[f"{n}-{i}" for i, (n, _) in enumerate(ADMITTED)])
def test_a_metric_at_the_edge_is_admitted(cell: Cell, name: str, found: Measurement) -> None:
    metrics = {"tg128_tok_s": rate(GOOD), name: found}
    assert judge(cell, metrics=metrics).metrics[name] == found


@pytest.mark.parametrize(
    ("tiers", "admitted"), [({"slots": 64, "count": 512, "layers": [0]}, True), ({"slots": 512, "count": 512, "layers": []}, False), (None, False)]
)
def test_four_sequences_may_be_slower_than_one_where_they_share_too_few_slots(cell: Cell, tiers: dict[str, Any] | None, admitted: bool) -> None:
    slow = rate([40.0, 41.0, 39.0, 40.5, 39.5], "agg@1")
    decision = judge(cell, metrics={"tg128_tok_s": rate(GOOD), "agg4_tg128_tok_s": slow}, evidence={"vocab_size": 4096, "tiers": tiers})
    assert ("agg4_tg128_tok_s" in decision.metrics) is admitted


def test_slots_do_not_excuse_any_rate(cell: Cell) -> None:
    evidence = {"vocab_size": 4096, "tiers": {"slots": 64, "count": 512, "layers": [0]}}
    slow = rate([0.2 * value for value in GOOD], "agg@1")
    decision = judge(cell, metrics={"tg128_tok_s": rate(GOOD), "agg4_tg128_tok_s": slow}, evidence=evidence)
    assert decision.gaps["agg4_tg128_tok_s"][0] is Status.IMPLAUSIBLE


@pytest.mark.parametrize(
    "tiers",
    ["tiered", [1], 3, True, {"layers": [0], "slots": 64}, {"layers": [0], "slots": None, "count": 512}, {"layers": 3, "slots": 6, "count": 9},
     {"layers": [0], "slots": "64", "count": 512}, {"layers": [0], "slots": [], "count": 512}, {"layers": [0], "slots": 1.5, "count": {}}],
)  # fmt: skip
def test_evidence_that_no_worker_wrote_says_nothing_of_slots(tiers: object) -> None:
    assert shares_slots({"tiers": tiers}) is False


def test_bits_per_byte_falls_with_its_perplexity(cell: Cell) -> None:
    ppl = Measurement(value=9999, unit="ppl", protocol="ppl/window@1")
    bits = Measurement(value=3.0, unit="bit/B", protocol="ppl/window@1")
    decision = judge(cell, metrics={"ppl": ppl, "bits_per_byte": bits, "tg128_tok_s": rate(GOOD)})
    assert decision.gaps["bits_per_byte"][0] is Status.IMPLAUSIBLE


def test_a_metric_the_worker_itself_doubts_is_a_gap(cell: Cell) -> None:
    load = {"load_s": Measurement(value=2.5, unit="s", protocol="load@1")}
    decision = judge(cell, metrics=load, gaps={"ppl": (Status.NUMERIC_INVALID, "NaN in window 3")})
    assert "ppl" not in decision.metrics
    assert decision.gaps["ppl"] == (Status.NUMERIC_INVALID, "NaN in window 3")


def test_no_speed_stands_beside_invalid_output(cell: Cell) -> None:
    metrics = {"tg128_tok_s": rate(GOOD), "load_s": Measurement(value=2.5, unit="s", protocol="load@1")}
    decision = judge(cell, metrics=metrics, gaps={"ppl": (Status.NUMERIC_INVALID, "NaN in window 3")})
    assert set(decision.metrics) == {"load_s"}
    assert decision.gaps["tg128_tok_s"] == (Status.NUMERIC_INVALID, "a speed does not stand beside invalid output (ppl: NaN in window 3)")
    assert decision.unadmitted["tg128_tok_s"] == metrics["tg128_tok_s"]


def test_a_model_that_disagrees_with_itself_admits_nothing(cell: Cell) -> None:
    parity = {"tokens": 64, "kld_mean": 0.5, "tolerance": 1e-6}
    decision = judge(cell, evidence={"parity": parity})
    assert decision.status is Status.PARITY_FAILED and not decision.metrics
    assert "mean KLD of 0.5, above 1e-06" in decision.reason
    assert judge(cell, evidence={"parity": parity | {"kld_mean": 1e-7}}).status is Status.OK


def outcomes(decision: Decision) -> dict[str, str]:
    return {g.gate: g.outcome for g in decision.gates}


def test_invalid_output_shows_at_its_gate_also_where_parity_ended_the_cell(cell: Cell) -> None:
    parity = {"parity": {"tokens": 64, "kld_mean": 0.5, "tolerance": 1e-6}}
    nan = judge(cell, evidence=parity, metrics={"load_s": Measurement(value=2.5, unit="s", protocol="load@1")}, gaps={"ppl": (Status.NUMERIC_INVALID, "NaN")})
    assert nan.status is Status.PARITY_FAILED and outcomes(nan)["numeric"] == "partly"
    assert outcomes(judge(cell, evidence=parity))["numeric"] == "passed"


def test_a_gate_without_anything_to_judge_was_not_passed(cell: Cell) -> None:
    found = outcomes(judge(cell, metrics={"load_s": Measurement(value=2.5, unit="s", protocol="load@1")}))
    assert found["numeric"] == "not_checked" and found["parity"] == "not_checked"
    assert found["speed"] == "partly", "rates that are missing are said"


def test_a_servers_residency_is_not_checked(cell: Cell) -> None:
    assert outcomes(judge(cell))["residency"] == "passed"
    assert outcomes(judge(cell.model_copy(update={"engine": "server"})))["residency"] == "not_checked"


def test_the_gates_of_an_admitted_cell_say_what_each_found(cell: Cell) -> None:
    decision = judge(cell, metrics={"ppl": Measurement(value=9.5, unit="ppl", protocol="ppl/window@1"), "tg128_tok_s": rate([50.0] * 5)})
    found = {g.gate: g for g in decision.gates}
    assert list(found) == list(GATES[GATES.index("load") :])
    assert found["plausibility"].outcome == "partly" and "without any spread" in found["plausibility"].detail
    assert found["parity"].outcome == "not_checked"
    assert found["numeric"].outcome == found["residency"].outcome == "passed"


def test_an_unknown_metric_is_noted_and_left_out(cell: Cell) -> None:
    decision = judge(cell, metrics={"speed": rate(GOOD), "tg128_tok_s": rate(GOOD)})
    assert "speed" not in decision.metrics
    assert "speed" not in decision.gaps
    assert any("speed" in note for note in decision.notes)


def test_ok_without_a_single_number_is_not_ok(cell: Cell) -> None:
    assert judge(cell, metrics={}).status is Status.NOT_RUN
    only_bad = {"tg128_tok_s": rate([50.0] * 5)}
    assert judge(cell, metrics=only_bad).status is not Status.OK


def test_a_gap_never_says_ok(cell: Cell) -> None:
    assert judge(cell, gaps={"load_s": (Status.OK, "")}).gaps["load_s"][0] is Status.NOT_RUN


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        ({"value": 999.0}, "its value is 999, its samples give 50.2"),
        ({"min": 1.0}, "its min is 1"),
        ({"stderr": -5.0}, "a standard error of -5 is impossible"),
        ({"roofline_pct": -50.0}, "-50 % of the bound is not what"),
        ({"roofline_pct": 5.0, "details": {"roofline_tok_s": 100.0}}, "5 % of the bound is not what value and bound give"),
    ],
)
def test_a_number_that_contradicts_its_own_samples_is_no_headline(cell: Cell, edit: dict[str, Any], reason: str) -> None:
    found = rate([50.0, 51.0, 49.0, 50.5, 50.2]).model_copy(update=edit)
    decision = judge(cell, metrics={"tg128_tok_s": found, "load_s": Measurement(value=2.5, unit="s", protocol="load@1")})
    assert "tg128_tok_s" not in decision.metrics
    status, why = decision.gaps["tg128_tok_s"]
    assert status is Status.NUMERIC_INVALID and reason in why
