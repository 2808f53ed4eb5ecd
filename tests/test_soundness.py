"""What a stored record must be to be read at all, and which of its numbers stand by today's rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.admission import refusal_of
from lab.metrics import METRICS
from lab.record import Gap, Measurement, Record, Status, WorkerResult
from lab.soundness import problems, refusals
from lab.store import load_record
from tests.matrix_helpers import PROVENANCE, cell, complete, measured, record

FINE, OTHER = cell("fine"), cell("reference")
GOOD = complete(FINE, 0.1)


def test_a_record_of_the_lab_has_no_problem() -> None:
    assert list(problems(GOOD)) == [] == list(problems(record(FINE, status=Status.OOM, artifact={"path": "weights"}, provenance={"fill": "x"})))
    failed = record(FINE, status=Status.PARITY_FAILED, evidence={"parity": {"kld_mean": float("nan"), "tolerance": 0.1, "tokens": 8}})
    assert list(problems(Record.model_validate_json(failed.model_dump_json()))) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cell_id": "../out"}, "cell_id: '../out' cannot be a folder's name"),
        ({"cell_id": OTHER.id}, f"cell_id: '{OTHER.id}' is not that of the cell in the record, '{FINE.id}'"),
        ({"cell_hash": OTHER.hash}, f"cell_hash: '{OTHER.hash}' is not that of the cell in the record, '{FINE.hash}'"),
        ({"cell": {}}, "cell.model: Field required"),
        ({"cell": {**GOOD.cell, "layers": "many"}}, "cell.layers: Input should be a valid integer"),
        ({"cell": {**GOOD.cell, "layers": 6}}, "cell_hash: "),
        ({"provenance": {**PROVENANCE, "experiments": None}}, "provenance.experiments: Input should be a valid dictionary"),
        ({"provenance": {**PROVENANCE, "experiments": {"small": 7}}}, "provenance.experiments.small: Input should be a valid string"),
        ({"provenance": {**PROVENANCE, "worker": ["SIGKILL"]}}, "provenance.worker: Input should be a valid dictionary"),
        ({"provenance": {**PROVENANCE, "machine": "mine"}}, "provenance.machine: Input should be a valid dictionary"),
        ({"provenance": {**PROVENANCE, "packages": {"torch": 2.9}}}, "provenance.packages.torch: Input should be a valid string"),
        ({"evidence": {"parity": 0.1}}, "evidence.parity: Input should be a valid dictionary"),
        ({"artifact": {"sha256": 12}}, "artifact.sha256: Input should be a valid string"),
        ({"finished_at": "later"}, "finished_at: 'later' is no time in ISO 8601"),
    ],
)
def test_what_readers_would_trip_over_makes_the_record_unreadable(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    bad = GOOD.model_copy(update=fields)
    assert next(problems(bad)).startswith(message)
    (tmp_path / "record.json").write_text(bad.model_dump_json())
    with pytest.raises(ValueError, match=r"^[a-z_.0-9]+: ") as caught:
        load_record(tmp_path / "record.json")
    assert str(caught.value).startswith(message)


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=2) | st.dictionaries(
    st.sampled_from(["experiments", "worker", "machine", "git", "packages", "sha256", "model", "layers"]), inner, max_size=3), max_leaves=5)  # fmt: skip


@given(st.sampled_from(["provenance", "artifact", "cell"]), st.sampled_from(["experiments", "worker", "machine", "git", "packages", "sha256", "layers"]), JSON)
def test_any_content_is_judged_and_never_a_crash(key: str, part: str, value: Any) -> None:
    data = json.loads(GOOD.model_dump_json())
    data[key] |= {part: value}
    assert all(": " in problem and "\n" not in problem for problem in problems(Record.model_validate(data)))


@pytest.mark.parametrize(
    ("metrics", "refused"),
    [
        ({"ppl": measured("ppl", -3.0)}, {"ppl": Status.NUMERIC_INVALID}),
        ({"ppl": measured("ppl", -3.0), "pp512_tok_s": measured("pp512_tok_s", 9.0)}, dict.fromkeys(("ppl", "pp512_tok_s"), Status.NUMERIC_INVALID)),
        ({"top1_agreement": measured("top1_agreement", 1.5), "ppl": measured("ppl", 20.0)}, {"top1_agreement": Status.NUMERIC_INVALID}),
        ({"load_s": measured("load_s", 0.0)}, {"load_s": Status.IMPLAUSIBLE}),
        ({"pp512_tok_s": measured("pp512_tok_s", 100.0, spread=0.0)}, {"pp512_tok_s": Status.IMPLAUSIBLE}),
        ({"ppl": measured("ppl", -3.0, protocol="ppl/window@0")}, {}),
        ({"mood": Measurement(value=-1.0, unit="x", protocol="mood@1")}, {}),
    ],
)
def test_a_number_is_judged_by_todays_rules_under_todays_protocol(metrics: dict[str, Measurement], refused: dict[str, Status]) -> None:
    assert {name: status for name, (status, _) in refusals(record(FINE, metrics)).items()} == refused


def test_the_records_own_evidence_counts() -> None:
    ppl = {"ppl": measured("ppl", 300.0)}
    assert refusals(record(FINE, ppl)) == {}
    assert refusals(record(FINE, ppl, evidence={"vocab_size": 256}))["ppl"][0] is Status.IMPLAUSIBLE


def test_what_the_record_itself_says_against_its_numbers_counts() -> None:
    """A speed does not stand beside output that was invalid, nor any number beside a model that disagrees with itself."""
    speed = {"pp512_tok_s": measured("pp512_tok_s", 9.0)}
    assert refusals(record(FINE, speed, gaps={"ppl": Gap(status=Status.TIMEOUT, reason="slow", fill="x")})) == {}
    beside_nan = record(FINE, speed, gaps={"ppl": Gap(status=Status.NUMERIC_INVALID, reason="NaN in the logits", fill="x")})
    assert "NaN in the logits" in refusals(beside_nan)["pp512_tok_s"][1]
    split = record(
        FINE, {**speed, "prefill_multiple": measured("prefill_multiple", 2.0)}, evidence={"parity": {"kld_mean": 0.5, "tolerance": 1e-3, "tokens": 8}}
    )
    assert {name: status for name, (status, _) in refusals(split).items()} == dict.fromkeys(split.metrics, Status.PARITY_FAILED)


@given(st.dictionaries(st.sampled_from(sorted(METRICS)), st.floats(-10, 1000), max_size=4))
def test_whatever_is_refused_when_it_is_measured_is_refused_later(values: dict[str, float]) -> None:
    metrics = {name: measured(name, value) for name, value in values.items()}
    result = WorkerResult(status=Status.OK, metrics=metrics)
    assert {name for name, found in metrics.items() if refusal_of(name, found, result)} <= refusals(record(FINE, metrics)).keys()
    assert refusals(record(FINE, {})) == {}
