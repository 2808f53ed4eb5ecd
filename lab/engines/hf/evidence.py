"""What speaks for and against a number that came through transformers: its class, its depth, the rows that went through every part, where the weights lie.

The counterpart of `lab.evidence` for `engine=transformers`, where operations do not count themselves. It shows that transformers' own model of this
architecture, with this many layers and the model's sizes, took every token exactly once through every layer, its experts and its table, on the cell's device.
Which kernel multiplied, and in which precision inside, is transformers' word.
"""

from __future__ import annotations

from typing import Any

from lab.cell import Cell
from lab.record import Status

Finding = tuple[Status, str]

_REQUIRED = ("transformers", "parts", "ops", "depth", "fed", "weights", "component_layers", "per_token")
_COMPARED = ("experts", "ple", "head", "embed")
"""Components whose numbers of weights must be those of the model's sizes; the rest of a layer is divided otherwise there."""


def check(cell: Cell, evidence: dict[str, Any]) -> list[Finding]:
    """Findings against the cell, worst first; empty when the evidence holds. `evidence` is that of `lab.engines.hf.attempt`."""
    if missing := [key for key in _REQUIRED if key not in evidence]:
        return [(Status.PATH_NOT_EXECUTED, f"the worker reported no {', '.join(missing)}: nothing shows that transformers ran the model")]
    findings = [*_model(cell, evidence), *_sizes(evidence), *_rows(cell, evidence), *_places(cell, evidence["parts"])]
    return sorted(findings, key=lambda f: f[0] is not Status.PATH_NOT_EXECUTED)


def _model(cell: Cell, evidence: dict[str, Any]) -> list[Finding]:
    name, findings = str(evidence["transformers"]["class"]), []
    if not name.startswith(f"transformers.models.{cell.model.arch}."):
        findings.append(_not_executed(f"{name} ran, which is not transformers' {cell.model.arch}"))
    if evidence["depth"] != cell.layers:
        findings.append(_not_executed(f"{evidence['depth']} layers were loaded, {cell.layers} were asked for"))
    return findings


def _sizes(evidence: dict[str, Any]) -> list[Finding]:
    """Whether the model holds as many weights as its sizes say."""
    held: dict[str, int] = {}
    for part in evidence["parts"]:
        held[part["component"]] = held.get(part["component"], 0) + part["weights"]
    wanted = evidence["weights"]
    return [
        _not_executed(f"{component}: transformers holds {held.get(component, 0)} weights, the model's sizes give {wanted.get(component, 0)}")
        for component in _COMPARED
        if held.get(component, 0) != wanted.get(component, 0)
    ]


def _rows(cell: Cell, evidence: dict[str, Any]) -> list[Finding]:
    """Whether embedding, layers, experts and table saw exactly the rows that the tokens fed need."""
    fed = evidence["fed"]
    if not fed:
        return [_not_executed("no token went through the model")]
    seen: dict[tuple[str, int | None], int] = {}
    for op in evidence["ops"]:
        seen[op["component"], op["layer"]] = seen.get((op["component"], op["layer"]), 0) + op["rows"]
    wanted: list[tuple[str, int | None]] = [("embed", None), *(("trunk", layer) for layer in range(cell.layers))]
    wanted += [(component, layer) for component in ("experts", "ple") for layer in evidence["component_layers"].get(component, ())]
    findings = []
    for component, layer in wanted:
        rows, need = seen.get((component, layer), 0), fed * evidence["per_token"].get(component, 1)
        if rows != need:
            where = component if layer is None else f"layer {layer} {component}"
            findings.append(_not_executed(f"{where}: {rows} rows were counted where the {fed} tokens fed need {need}"))
    return findings


def _places(cell: Cell, parts: list[dict[str, Any]]) -> list[Finding]:
    device, dtype = cell.device.torch_device.split(":")[0], cell.device.compute_dtype
    elsewhere = sorted({f"{part['component']} on {part['device']}" for part in parts if part["device"] != device})
    others = sorted({f"{part['component']} in {part['dtype']}" for part in parts if part["dtype"] != dtype})
    findings = [(Status.DEGRADED, f"weights are not on {device}: {', '.join(elsewhere)}")] if elsewhere else []
    return findings + ([_not_executed(f"weights are not in {dtype}: {', '.join(others)}")] if others else [])


def _not_executed(reason: str) -> Finding:
    return Status.PATH_NOT_EXECUTED, reason
