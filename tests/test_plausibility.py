"""The rules across numbers: each fires on what it is for and on nothing else, for measured and reported numbers alike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.plausibility import SENTENCES, Flag, Observation, flags


def seen(name: str, quantity: str, value: float, layers: int | None = 3, spread: float = 0.0, **rest: object) -> Observation:
    fields: dict[str, object] = {"series": "paiton_native", "low": value * (1 - spread), "high": value * (1 + spread), **rest}
    return Observation(name=name, layers=layers, quantity=quantity, value=value, **fields)  # type: ignore[arg-type]


def about(found: list[Flag]) -> set[tuple[str, tuple[str, ...]]]:
    return {(flag.rule, flag.names) for flag in found}


def test_the_first_post_is_flagged_where_it_does_not_fit() -> None:
    tg = [seen("3-tg", "tg", 174.28, 3), seen("6-tg", "tg", 163.51, 6), seen("24-tg", "tg", 243.32, 24)]
    agg = [seen("3-agg4", "agg4", 74.78, 3), seen("6-agg4", "agg4", 67.48, 6), seen("24-agg4", "agg4", 65.08, 24)]
    pp = [seen("3-pp", "pp", 6485, 3), seen("6-pp", "pp", 5128, 6), seen("24-pp", "pp", 1465, 24)]
    found = flags([*tg, *agg, *pp])
    assert about(found) == {
        ("depth_inversion", ("3-tg", "24-tg")),
        ("depth_inversion", ("6-tg", "24-tg")),
        *(("aggregate_below_single", (f"{layers}-agg4", f"{layers}-tg")) for layers in (3, 6, 24)),
    }
    sentence = next(f for f in found if f.names == ("3-tg", "24-tg")).sentence()
    assert sentence.startswith("TG, paiton_native: 243.3 tok/s at 24 layers is faster than 174.3 tok/s at 3 layers")
    weak = next(f for f in found if f.names == ("3-agg4", "3-tg")).sentence()
    assert weak.startswith("4-way, paiton_native, 3 layers: 4 sequences together reach 74.78 tok/s, less than one alone at 174.3 tok/s")


def test_overlapping_samples_are_no_inversion_and_no_weak_aggregate() -> None:
    assert not flags([seen("a", "tg", 100, 3, 0.1), seen("b", "tg", 105, 6, 0.1)])
    assert not flags([seen("a", "tg", 100, 3, 0.1), seen("b", "agg4", 95, 3, 0.1)])


def test_four_that_push_each_others_experts_out_may_be_slower_than_one() -> None:
    pair = [seen("a", "tg", 96.5), seen("b", "agg4", 84.9)]
    assert about(flags(pair)) == {("aggregate_below_single", ("b", "a"))}
    assert not flags([pair[0], seen("b", "agg4", 84.9, shares_slots=True)])
    assert about(flags([pair[0], seen("b", "agg4", 24.0, shares_slots=True)])) == {("aggregate_below_single", ("b", "a"))}


def test_numbers_of_another_series_are_not_set_against_each_other() -> None:
    assert not flags([seen("a", "tg", 100, 3), seen("b", "tg", 200, 6, series="expert_q2")])
    assert not flags([seen("a", "tg", 100, 3), seen("b", "agg4", 50, 3, series="expert_q2"), seen("c", "agg4", 50, 6)])


def test_a_bound_may_be_reached_within_its_own_error_and_not_passed() -> None:
    bound = {"bound": 100.0, "basis": "read bandwidth"}
    assert not flags([seen("a", "tg", 104, **bound)])
    (found,) = flags([seen("a", "tg", 106, **bound)])
    assert found.sentence() == "TG, paiton_native, 3 layers: 106 tok/s is above the physical bound of 100 tok/s (read bandwidth)"


def test_a_perplexity_above_the_vocabulary() -> None:
    assert not flags([seen("a", "ppl", 3222, vocabulary=248320)])
    (found,) = flags([seen("a", "ppl", 250000, vocabulary=248320)])
    assert found.rule == "above_vocabulary" and "worse than guessing" in found.sentence()


@given(st.lists(st.tuples(st.integers(1, 48), st.floats(1, 1e4)), max_size=8))
def test_speeds_that_fall_with_depth_are_never_flagged(points: list[tuple[int, float]]) -> None:
    depths, speeds = sorted({d for d, _ in points}), sorted((v for _, v in points), reverse=True)
    falling = [seen(str(d), "tg", v, d) for d, v in zip(depths, speeds, strict=False)]
    assert not flags(falling)
    if len(falling) > 1 and falling[0].value > falling[-1].value * 1.001:
        rising = [seen(o.name, "tg", o.value, falling[-1 - i].layers) for i, o in enumerate(falling)]
        assert flags(rising), "the same speeds the other way round must be"


@pytest.mark.parametrize("rule", SENTENCES)
def test_every_rule_has_its_sentence_in_both_languages(rule: str) -> None:
    names = [part.split("}")[0] for part in SENTENCES[rule]["en"].split("{")[1:]]
    for language, text in SENTENCES[rule].items():
        facts = tuple((name, f"<{name}>") for name in names if name != "where")
        shown = Flag(rule, ("a",), "agg4", "some path", 3, facts).sentence(language)
        assert all(value in shown for _, value in facts) and "some path" in shown and "3" in shown, language
        assert "{" not in text.format(**dict.fromkeys(names, "x"))
    chinese = Flag(rule, ("a",), "agg4", "some path", 3, tuple((name, "1") for name in names if name != "where")).sentence("zh")
    assert "layers" not in chinese and "4-way" not in chinese and "\uff1a" in chinese


def test_rates_at_other_depths_and_lengths_stand_under_the_same_rules() -> None:
    deep = [seen("a", "tg128_d4096_tok_s", 100, 3), seen("b", "tg128_d4096_tok_s", 200, 6), seen("c", "agg4_tg128_d4096_tok_s", 90, 3)]
    assert about(flags(deep)) == {("depth_inversion", ("a", "b")), ("aggregate_below_single", ("c", "a"))}
    weak = next(flag for flag in flags(deep) if flag.rule == "aggregate_below_single")
    assert weak.sentence().startswith("4-way TG at depth 4096, paiton_native, 3 layers: 4 sequences together reach 90 tok/s")
    assert weak.sentence("zh").startswith("4 路 TG，上下文 4096，paiton_native")
    # A rate at another depth or of a prompt is no single stream of this one, and long prompts together may be slower than one.
    assert not flags(
        [seen("c", "agg4_tg128_d4096_tok_s", 90, 3), seen("d", "tg", 100, 3), seen("e", "agg4_pp4096_tok_s", 90, 3), seen("f", "pp4096_tok_s", 100, 3)]
    )
