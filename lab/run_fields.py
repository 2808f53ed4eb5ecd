"""A record as MLflow sees it: its terminal status, params, tags and metrics.

Plain mappings, so that what a run will say can be checked without a store. A gap is a tag `gap.<metric>`, never a number. The tags say how the attempt
ended and how it stands among its cell's attempts, by protocol versions and marks. Two things only the matrix of an experiment can tell: whether the
weights are those it pins (here is their tag `weights_sha256`), and which numbers cannot both be right when cells are set against each other.
"""

from __future__ import annotations

import json

from lab.record import Record, Status
from lab.soundness import refusals
from lab.standing import Standing, record_id

_TAG_LIMIT = 5000


def run_status(record: Record) -> str:
    """MLflow's terminal status: FINISHED for OK, KILLED for what was stopped from outside, FAILED for every other gap."""
    if record.status is Status.OK:
        return "FINISHED"
    worker = record.provenance.get("worker", {})
    stopped = worker.get("ended") in ("timeout", "interrupted", "lab_killed") or worker.get("signal") in ("SIGKILL", "SIGTERM")
    return "KILLED" if stopped else "FAILED"


def params(record: Record) -> dict[str, str]:
    """The flat, short choices to group and compare runs by. The whole configuration is the artifact config.yaml."""
    cell = record.cell
    flat = {key: cell[key]["name"] for key in ("model", "path", "device", "bench")} | {key: cell[key] for key in ("layers", "engine")}
    for component, part in cell["path"]["components"].items():
        flat[f"codec.{component}"] = part["codec"]
        if part.get("options"):
            flat[f"options.{component}"] = json.dumps(part["options"], sort_keys=True)
    # Absent from the cells of before there were such choices, and then as their default is.
    flat["mode"] = cell.get("mode", "auto")
    flat |= {"disable": cell["disable"]} if cell.get("disable") else {}
    flat |= {f"placement.{key}": value for key, value in cell.get("placement", {}).items() if value is not None}
    return {name: _fit(str(value)) for name, value in flat.items()}


def tags(record: Record) -> dict[str, str]:
    """What identifies the attempt, and one tag for every gap."""
    found = {
        "cell_id": record.cell_id,
        "cell_hash": record.cell_hash,
        "resume_key": record.resume_key,
        "status": record.status.value,
        "reason": record.reason or "-",
        "path": str(record.cell["path"]["name"]),
        "layers": str(record.cell["layers"]),
        "attempt": str(record.attempt),
        "fill": str(record.provenance.get("fill", "-")),
        "mlflow.source.name": "python -m lab run",
    }
    commit = (record.provenance.get("git") or {}).get("commit")
    found |= {"mlflow.source.git.commit": commit} if commit else {}
    found |= {f"gap.{name}": f"{gap.status}: {gap.reason}" for name, gap in record.gaps.items()}
    return {name: _fit(value) for name, value in found.items()} | judged_tags(record)


def judged_tags(record: Record) -> dict[str, str]:
    """The tags that a run mirrored by an earlier lab may lack: who the record is, its weights (where known), and a gap for each number refused today."""
    found = {"record_id": record_id(record)}
    if weights := record.artifact.get("sha256"):
        found["weights_sha256"] = str(weights)
    found |= {f"gap.{name}": f"{status}: {reason}" for name, (status, reason) in refusals(record).items()}
    return {name: _fit(value) for name, value in found.items()}


def standing_tag(standing: Standing) -> dict[str, str]:
    """How the attempt stands, in the one tag that changes after the run ended."""
    return {"standing": _fit(standing.text)}


def metric_values(record: Record) -> dict[str, float]:
    """The numbers that stand by today's rules, with the extremes of repeated ones and the share of the physical bound."""
    values: dict[str, float] = {}
    refused = refusals(record)
    for name, found in ((name, found) for name, found in record.metrics.items() if name not in refused):
        extra = {"": found.value, "_min": found.min, "_max": found.max, "_roofline_pct": found.roofline_pct}
        values |= {name + suffix: value for suffix, value in extra.items() if value is not None}
    return values


def _fit(text: str) -> str:
    """`text` within MLflow's limit for tags, cut where everybody sees it."""
    return text if len(text) <= _TAG_LIMIT else text[: _TAG_LIMIT - 40] + " ... [cut; whole in record.json]"
