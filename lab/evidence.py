"""Whether the claimed path ran: a path's `evidence:` rules against what the engine counted.

Every rule names a component and the operation that must have computed it (`source`: whatever precision the file holds). In every layer that has the
component, that operation and no other must have run, on the device the placement names, and on exactly the rows that the tokens forwarded need; and
the stated share of the component's weights, counted from the model's sizes, must be resident there. A cell whose counters disagree has not
measured its path, whatever its numbers.
"""

from __future__ import annotations

from typing import Any

from lab.cell import Cell, EvidenceRule
from lab.engines import server_evidence
from lab.engines.hf import evidence as hf_evidence
from lab.engines.llama_cpp import evidence as llama_cpp_evidence
from lab.engines.strip_limits import strip_limits
from lab.placement import checks as placed
from lab.record import Status

Finding = tuple[Status, str]

_REQUIRED = ("ops", "resident", "component_layers", "layers", "source_codecs", "weights", "rows_per_token", "tokens_forwarded")
_ROUNDING = 1e-9
_ALWAYS = ("trunk", "head")
"""Components no model is without; the n-gram table can be absent at a small depth."""
_EXPERTS = {("experts", "qwen4_exp")}
"""Dense models have none, and a mixture may begin with dense layers."""


def check(cell: Cell, evidence: dict[str, Any]) -> list[Finding]:
    """Findings against the cell's path, worst first; empty when the evidence holds. `evidence` is the worker's (see `lab.engines.local_attempt`)."""
    if cell.engine == "server":
        return server_evidence.check(cell, evidence)
    if cell.engine == "llama_cpp":
        return llama_cpp_evidence.check(cell, evidence)
    if cell.engine == "transformers":
        return hf_evidence.check(cell, evidence)
    if missing := [key for key in _REQUIRED if key not in evidence]:
        return [(Status.PATH_NOT_EXECUTED, f"the worker reported no {', '.join(missing)}: nothing shows that the path ran")]
    if evidence["layers"] != cell.layers:
        return [(Status.PATH_NOT_EXECUTED, f"{evidence['layers']} layers ran, {cell.layers} were asked for")]
    if not evidence["tokens_forwarded"]:
        return [(Status.PATH_NOT_EXECUTED, "no token went through the model")]
    if not cell.path.evidence:
        return [(Status.PATH_NOT_EXECUTED, f"path {cell.path.name} has no evidence rules, so nothing can show that it ran")]
    findings = [*_launches(cell, evidence), *_fallbacks(cell, evidence), *_strips(cell, evidence), *placed.findings(cell, evidence)]
    findings += [f for rule in cell.path.evidence for f in _check_rule(cell, rule, evidence)]
    findings += _options(cell, evidence)
    return sorted(findings, key=lambda f: f[0] is not Status.PATH_NOT_EXECUTED)


def _check_rule(cell: Cell, rule: EvidenceRule, evidence: dict[str, Any]) -> list[Finding]:
    layers = evidence["component_layers"].get(rule.component, [])
    if not layers:
        absent = (Status.PATH_NOT_EXECUTED, f"{rule.component}: the model that ran has no such component")
        return [absent] if rule.component in _ALWAYS or (rule.component, cell.model.arch) in _EXPERTS else []
    allowed = set(evidence["source_codecs"].get(rule.component, [])) if rule.op == "source" else {rule.op}
    device = _device(cell, rule.component)
    findings = []
    for layer in layers:
        here = [op for op in evidence["ops"] if (op["component"], op["layer"]) == (rule.component, layer) and op["calls"] > 0]
        where = rule.component if layer is None else f"layer {layer} {rule.component}"
        devices = placed.devices_of(cell, rule.component, device)
        if problem := _problem(here, allowed, devices, _expected_rows(evidence, layer, rule.component), " or ".join(sorted(allowed)) or rule.op):
            findings.append((Status.PATH_NOT_EXECUTED, f"{where}: {problem}"))
    required = rule.residency * placed.promised_share(cell, rule.component, evidence)
    if (share := _resident_share(rule, allowed, device, evidence)) < required - _ROUNDING:
        findings.append((Status.DEGRADED, f"{rule.component}: {share:.1%} of its weights are resident as {rule.op}, {required:.1%} are required"))
    return findings


def _launches(cell: Cell, evidence: dict[str, Any]) -> list[Finding]:
    """Decoding that was asked to be launched one way and was launched another; `mode=auto` leaves it to the engine, and the record's note says why."""
    ran = evidence.get("graph", {})
    if cell.mode == "auto" or ran.get("mode") == cell.mode:
        return []
    told = f"decoding ran {'operation by operation' if ran['mode'] == 'eager' else 'as a captured graph'}" if ran else "the worker reported no launches"
    return [(Status.PATH_NOT_EXECUTED, f"mode={cell.mode} was asked for; {told}" + (f": {ran['reason']}" if ran.get("reason") else ""))]


def _fallbacks(cell: Cell, evidence: dict[str, Any]) -> list[Finding]:
    """Components whose codec has a GPU kernel and that ran as torch although the kernel takes such weights."""
    if cell.disable is not None and evidence.get("disabled") != cell.disable:
        return [(Status.PATH_NOT_EXECUTED, f"disable={cell.disable} was asked for, and the worker did not say that it was done")]
    faults = [one for one in evidence.get("fallbacks", ()) if one["fault"]]
    return [
        (Status.DEGRADED, f"{one['component']}: {one['codec']} ran as torch in {one['operations']} operations, where it has a GPU kernel: {one['reason']}")
        for one in faults
    ]


def _strips(cell: Cell, evidence: dict[str, Any]) -> list[Finding]:
    """Strip caches (`lab.engines.strips`) that do not hold everything, or that budgets ask for and nobody reported."""
    limits = strip_limits(cell)
    told = evidence.get("strips", {})
    places = {place["where"]: place for place in told.get("places", ())}
    if missing := [limit.where for limit in limits if limit.where not in places]:
        return [(Status.PATH_NOT_EXECUTED, f"budgets were given, and the worker reported no strip cache on the {' and '.join(missing)}")]
    partly = [place for place in places.values() if place["kept"] < place["total"]]
    short = [f"{place['where']}: {place['kept']} of {place['total']} weights resident ({place['limit']})" for place in partly]
    worked = f"while running, weights were built from the file's blocks {told.get('rebuilt')} times and moved to the device {told.get('moved')} times"
    return [(Status.DEGRADED, f"{', '.join(short)}; {worked}")] if short else []


def _options(cell: Cell, evidence: dict[str, Any]) -> list[Finding]:
    """Codec options that the cell asked for and that did not run: two cells may differ in nothing else."""
    ran = evidence.get("codec_options", {})
    findings = []
    for component, plan in cell.path.components.items():
        if not evidence["component_layers"].get(component):
            continue
        for key, value in plan.options.items():
            found = ran.get(component, {}).get(key)
            if found != (list(value) if isinstance(value, tuple) else value):
                findings.append((Status.PATH_NOT_EXECUTED, f"{component}: {plan.codec} ran with {key}={found}, {key}={value} was asked for"))
    return findings


def _problem(ops: list[dict[str, Any]], allowed: set[str], devices: set[str], expected_rows: int | None, name: str) -> str | None:
    """What speaks against one component of one layer, or None."""
    if others := sorted({op["op"] for op in ops} - allowed):
        return f"{', '.join(others)} ran where only {name} may"
    if not ops:
        return f"no {name} operation was counted"
    if wrong := sorted({op["device"] for op in ops} - devices):
        return f"ran on {', '.join(wrong)} instead of {' or '.join(sorted(devices))}"
    rows = sum(op["rows"] for op in ops)
    if expected_rows is not None and rows != expected_rows:
        return f"{rows} rows were computed where the tokens forwarded need {expected_rows}: another computation took part"
    return None


def _expected_rows(evidence: dict[str, Any], layer: int | None, component: str) -> int | None:
    """Rows the component must have seen in this layer, or None where the number depends on what was asked of the model (the head)."""
    for known_layer, known, rows in evidence["rows_per_token"]:
        if (known_layer, known) == (layer, component):
            return int(rows) * int(evidence["tokens_forwarded"])
    return None


def _resident_share(rule: EvidenceRule, allowed: set[str], device: str, evidence: dict[str, Any]) -> float:
    """Share of the component's weights, by the model's sizes, that lie on `device` in an allowed codec."""
    there = sum(e["weights"] for e in evidence["resident"] if e["component"] == rule.component and e["codec"] in allowed and e["device"] == device)
    needed = evidence["weights"].get(rule.component, 0)
    return there / needed if needed else 0.0


def _device(cell: Cell, component: str) -> str:
    plan = cell.path.components.get(component)
    return "cpu" if plan is not None and plan.placement == "host" else cell.device.torch_device.split(":")[0]
