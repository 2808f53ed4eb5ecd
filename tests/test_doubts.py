"""Series of measured rates: an edit of the lab's code or a new kernel leaves the rules on, another machine or other weights do not."""

from __future__ import annotations

from typing import Any

import pytest

from lab.doubts import Rate, observations
from lab.plausibility import Flag, flags
from tests.matrix_helpers import PROVENANCE, cell, complete, measured

MACHINE = PROVENANCE["machine"]


@pytest.mark.parametrize(("tiers", "crowded"), [({"slots": 64, "count": 512, "layers": [0, 1]}, True), ({"slots": 512, "count": 512, "layers": []}, False)])
def test_sequences_that_share_too_few_slots_are_told_apart(tiers: dict[str, Any], crowded: bool) -> None:
    of = cell("fine", 3)
    record = complete(of, 0.1, 100.0, evidence={"tiers": tiers})
    (found,) = observations([Rate("r", of, record, "agg4", measured("agg4_tg128_tok_s", 50.0))])
    assert found.shares_slots is crowded


def inversion(details: dict[str, Any] | None = None, artifact: str = "f00d" * 16, **provenance: Any) -> list[Flag]:
    """The flags over 100 tok/s at 3 layers and 150 at 6, the latter measured under these circumstances."""
    rates = []
    for layers, speed in ((3, 100.0), (6, 150.0)):
        changed = {"provenance": {**PROVENANCE, **provenance}, "artifact": {"sha256": artifact}} if layers == 6 else {}
        of = cell("fine", layers)
        found = measured("pp512_tok_s", speed, details=(details or {}) if layers == 6 else {})
        rates.append(Rate(f"L{layers}", of, complete(of, 0.1, speed, **changed), "pp", found))
    return flags(observations(rates))


@pytest.mark.parametrize(
    ("provenance", "remark"),
    [
        ({}, False),
        ({"code_sha256": "beef" * 16}, True),
        ({"machine": {**MACHINE, "system": "Linux 9.9", "memory_bytes": 7}}, False),
        ({"git": {"commit": "def5678", "dirty": True}}, False),
    ],
)
def test_more_layers_faster_is_seen_across_code_and_kernels_and_other_code_is_said(provenance: dict[str, Any], remark: bool) -> None:
    (flag,) = inversion(**provenance)
    assert (flag.rule, flag.names) == ("depth_inversion", ("L3", "L6"))
    assert flag.sentence().endswith("; the two ran different code of the lab") == remark
    assert ("实验室代码不同" in flag.sentence("zh")) == remark


@pytest.mark.parametrize(
    "changed",
    [
        {"machine": {**MACHINE, "cpu": "Other CPU"}},
        {"machine": {**MACHINE, "cores": 96}},
        {"machine": None},
        {"packages": {"torch": "2.10.0"}},
        {"packages": {**PROVENANCE["packages"], "triton": "3.6"}},
        {"artifact": "dead" * 16},
        {"details": {"cache_state": "cold"}},
    ],
)
def test_other_hardware_torch_weights_or_cache_is_another_series(changed: dict[str, Any]) -> None:
    assert inversion(**changed) == []
