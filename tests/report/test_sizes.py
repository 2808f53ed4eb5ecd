"""Tables of an experiment at true size: speeds by prompt and context with their rooflines, tiers, shares; and targets set for a share of the roofline.

The stage is the registered one; its records are invented.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab.errors import LabError
from lab.experiment import load_experiment
from lab.matrix import Matrix
from lab.record import Measurement, Record
from lab.report.build import assess
from lab.report.charts import draw
from lab.report.sizes import share_tables, size_tables, tier_tables
from lab.report.tables import references
from tests.matrix_helpers import PROVENANCE, measured, record
from tests.report.support import EN, EXPERIMENTS, ZH, section, stage, text_of

NAME = "flash_next_h200"
EMPTY = stage(NAME)


def rate(metric: str, value: float, percent: float | None = None, **details: Any) -> Measurement:
    bound = None if percent is None else 100 * value / percent
    found = measured(metric, value, details={"roofline_tok_s": bound, **details})
    return found if bound is None else found.model_copy(update={"roofline_pct": 100 * found.value / bound})


def of(path: str, layers: int, metrics: dict[str, Measurement], **point: str) -> Record:
    wanted = {"path": path, "layers": str(layers), **point}
    row = next(row for row in EMPTY.rows if {key: row.point.get(key) for key in ("path", "layers", "placement.slots", "engine") if key in row.point} == wanted)
    machine = {"cpu": "C", "cores": 16, "accelerators": ["NVIDIA H200"]}
    return record(row.cell, metrics, provenance=PROVENANCE | {"machine": machine})


def share(value: float, shares: dict[str, float]) -> Measurement:
    parts = dict.fromkeys(shares, 10.0)
    return measured("decode_experts_share", value, details={"share_by_component": shares, "us_per_pass": parts, "launches_per_pass": parts})


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    whole = {
        "tg128_tok_s": rate("tg128_tok_s", 500.0, 61.0),
        "agg4_tg128_tok_s": rate("agg4_tg128_tok_s", 1000.0, 44.0),
        "tg128_d0_tok_s": rate("tg128_d0_tok_s", 510.0, 62.0),
        "tg128_d4096_tok_s": rate("tg128_d4096_tok_s", 480.0, 60.0),
        "pp4096_tok_s": rate("pp4096_tok_s", 9000.0),
        "decode_experts_share": share(0.25, {"experts": 0.25, "gdn": 0.5, "other": 0.25}),
    }
    curve = {"slots": {"64": 0.4, "512": 0.9}}
    tier = {
        "tg128_tok_s": rate("tg128_tok_s", 100.0, 85.0),
        "expert_hit_rate": measured("expert_hit_rate", 0.75, details={"hit_curve": curve}),
        "bus_bytes_s": measured("bus_bytes_s", 5.1e10),
    }
    return stage(NAME, [of("expert_q2", 48, whole), of("tiered", 48, tier, **{"placement.slots": "256"})])


def test_speeds_stand_by_size_with_their_share_of_the_bound_and_gaps_as_gaps(matrix: Matrix) -> None:
    one, four = size_tables(matrix, references(matrix), EN)
    assert (one.title, four.title) == ("48 layers, one sequence, tok/s", "48 layers, four sequences together, total tok/s")
    assert one.header == ["Path", "Record", "PP 512", "PP 2048", "PP 4096", "TG @ 0", "TG @ 512", "TG @ 4096"]
    assert [line[0] for line in one.rows] == ["expert_q2", "tiered placement.slots=256"]
    gap = "*NOT_RUN*"
    assert one.rows[0][2:] == [gap, gap, "9000", "510 (62 %)", "500 (61 %)", "480 (60 %)"]
    assert one.rows[1][2:] == [gap, gap, gap, gap, "100 (85 %)", gap]
    assert four.rows[0][2:] == [gap] * 4 + ["1000 (44 %)", gap]


def test_tiers_and_shares_have_tables_of_their_own(matrix: Matrix) -> None:
    tiers, curve = tier_tables(matrix, EN)
    assert tiers.rows[0][0] == "tiered placement.slots=256, 48 layers" and tiers.rows[0][1] == "75.00" and "51.0" in tiers.rows[0]
    assert curve.header[1:] == ["64", "512"] and curve.rows[0][1:] == ["40 %", "90 %"]
    (shares,) = share_tables(matrix, ZH)
    assert shares.header[1:4] == ["门控 DeltaNet", "路由专家", "其他"] and shares.rows[0][1:] == ["50 %", "25 %", "25 %", "30", "30"]


def test_both_languages_tell_the_tables_and_the_short_ones_stay_narrow(matrix: Matrix) -> None:
    for language in ("en", "zh"):
        text = section(text_of(matrix, language), 2)
        assert "500 (61 %)" in text and "75.00" in text and "| 40 % |" in text.replace("  ", " ").replace("  ", " ")
    short = section(text_of(matrix), 2).split("\n### ")[1]
    assert "Prefill" not in short and "Share" not in short and "Expert requests" not in short
    assert size_tables(stage("flash_next_r9700"), {}, EN) == []


def test_a_target_may_be_a_share_of_the_roofline(matrix: Matrix) -> None:
    words = {(result.target.metric, result.target.value): result.word for result in assess(matrix, EN).targets}
    assert words == {("tg128_tok_s", 60): "REACHED", ("agg4_tg128_tok_s", 55): "MISSED", ("pp4096_tok_s", 40): "OPEN", ("tg128_tok_s", 80): "REACHED"}
    text = text_of(matrix)
    assert ">= 60 % of the roofline" in section(text, 1) and "61 % REACHED" in section(text, 3) and "44 % MISSED" in section(text, 3)
    assert ">= 60 % 屋顶线" in section(text_of(matrix, "zh"), 1)


def test_a_criterion_may_set_two_metrics_of_one_cell_against_each_other(matrix: Matrix) -> None:
    found = {verdict.hypothesis.id: verdict for verdict in assess(matrix, EN).verdicts}
    assert found["four-together-pay"].word == "FAILS", "1000 is 2.0 times 500"
    assert found["deep-context-costs-little"].word == "HOLDS"
    assert "2.2 × (Decode, 128 tokens)" in section(text_of(matrix), 1)


def test_charts_of_shares_are_drawn_in_percent(matrix: Matrix) -> None:
    assessed = assess(matrix, EN)
    drawn = draw(matrix, assessed.verdicts, assessed.targets, assessed.claims, assessed.capacity)
    assert {"target_1", "target_2", "target_4", "four-together-pay"} <= set(drawn) and "target_3" not in drawn


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('value: 60, unit: "%"', "value: 60, unit: tok/s", "a share of the roofline is in %, not tok/s"),
        ("against_metric: tg128_tok_s", "against_metric: load_s", "against_metric: is in s, agg4_tg128_tok_s in tok/s"),
        ("against_metric: tg128_tok_s", "against_metric: nothing", "'nothing' is not among this experiment's metrics"),
    ],
)
def test_a_wrong_target_or_criterion_is_one_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (EXPERIMENTS / f"{NAME}.yaml").read_text(encoding="utf-8")
    assert text.count(old) == 1
    (tmp_path / f"{NAME}.yaml").write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(LabError) as raised:
        load_experiment(NAME, tmp_path)
    assert message.removeprefix("against_metric: ") in str(raised.value)
