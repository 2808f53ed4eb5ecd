"""Whether the claimed path ran: a path's `evidence:` rules against what the engine counted.

Every rule names a component and the operation that must have computed it. In every layer that has the component, that operation and no other must
have run, on the device the placement names; routed experts must have seen exactly the tokens that entered the model; and the stated share of the
component's bytes must be resident there. A cell whose counters disagree has not measured its path, whatever its numbers.
"""

from __future__ import annotations

from typing import Any

from lab.cell import Cell, EvidenceRule
from lab.record import Status

Finding = tuple[Status, str]


def check(cell: Cell, evidence: dict[str, Any]) -> list[Finding]:
    """Findings against the cell's path, worst first; empty when the evidence holds. `evidence` is the worker's (see `lab.worker`)."""
    required = ("ops", "resident", "component_layers", "layers")
    if missing := [key for key in required if key not in evidence]:
        return [(Status.PATH_NOT_EXECUTED, f"the worker reported no {', '.join(missing)}: nothing shows that the path ran")]
    if evidence["layers"] != cell.layers:
        return [(Status.PATH_NOT_EXECUTED, f"{evidence['layers']} layers ran, {cell.layers} were asked for")]
    if not cell.path.evidence:
        return [(Status.PATH_NOT_EXECUTED, f"path {cell.path.name} has no evidence rules, so nothing can show that it ran")]
    findings = [f for rule in cell.path.evidence for f in _check_rule(cell, rule, evidence)]
    return sorted(findings, key=lambda f: f[0] is not Status.PATH_NOT_EXECUTED)


def _check_rule(cell: Cell, rule: EvidenceRule, evidence: dict[str, Any]) -> list[Finding]:
    layers = evidence["component_layers"].get(rule.component, [])
    ops = [op for op in evidence["ops"] if op["component"] == rule.component and op["calls"] > 0]
    findings = []
    for layer in layers:
        here = [op for op in ops if op["layer"] == layer]
        where = rule.component if layer is None else f"layer {layer} {rule.component}"
        others = sorted({op["op"] for op in here} - {rule.op})
        if others:
            findings.append((Status.PATH_NOT_EXECUTED, f"{where}: {', '.join(others)} ran where only {rule.op} may"))
        elif not here:
            findings.append((Status.PATH_NOT_EXECUTED, f"{where}: no {rule.op} operation was counted"))
        elif wrong := sorted({op["device"] for op in here} - {_device(cell, rule.component)}):
            findings.append((Status.PATH_NOT_EXECUTED, f"{where}: ran on {', '.join(wrong)} instead of {_device(cell, rule.component)}"))
        elif rule.component == "experts" and (problem := _lost_tokens(here, evidence)):
            findings.append((Status.PATH_NOT_EXECUTED, f"{where}: {problem}"))
    if layers and (share := _resident_share(cell, rule, evidence)) < rule.residency:
        findings.append((Status.DEGRADED, f"{rule.component}: {share:.1%} of its bytes are resident as {rule.op}, {rule.residency:.1%} are required"))
    return findings


def _lost_tokens(ops: list[dict[str, Any]], evidence: dict[str, Any]) -> str | None:
    """Each token passes k experts, each with two matrices: 2k rows per token. Fewer or more means another computation took part."""
    rows, expected = sum(op["rows"] for op in ops), 2 * evidence["experts_per_token"] * evidence["tokens_forwarded"]
    return None if rows == expected else f"{rows} expert rows were computed where the tokens forwarded need {expected}"


def _resident_share(cell: Cell, rule: EvidenceRule, evidence: dict[str, Any]) -> float:
    entries = [e for e in evidence["resident"] if e["component"] == rule.component]
    there = sum(e["bytes"] for e in entries if e["codec"] == rule.op and e["device"] == _device(cell, rule.component))
    total = sum(e["bytes"] for e in entries)
    return there / total if total else 0.0


def _device(cell: Cell, component: str) -> str:
    plan = cell.path.components.get(component)
    return "cpu" if plan is not None and plan.placement == "host" else cell.device.torch_device.split(":")[0]
