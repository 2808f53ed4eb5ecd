"""What speaks for and against a number that came through a server: requests, model name, prompt cache.

The counterpart of `lab.evidence` for `engine=server`, where no operation can be counted. It shows that the named model answered every request, each
prompt afresh. It does not show which kernels ran, in which precision, or where the weights lay: that is the server's word, and the path's rules for
single components stay unchecked.
"""

from __future__ import annotations

from typing import Any

from lab.cell import Cell
from lab.record import Status

Finding = tuple[Status, str]

MAX_SHARED_TOKENS = 8
"""Tokens that two unrelated prompts may share at their start: a BOS token and salts that begin alike. A cache of blocks hits in steps of 16 or more."""

_REQUIRED = ("server", "requests")


def check(cell: Cell, evidence: dict[str, Any]) -> list[Finding]:
    """Findings against the cell, worst first; empty when the evidence holds. `evidence` is that of `lab.engines.server.attempt`."""
    if missing := [key for key in _REQUIRED if key not in evidence]:
        return [(Status.PATH_NOT_EXECUTED, f"the worker reported no {', '.join(missing)}: nothing shows that the server was asked")]
    server, requests = evidence["server"], evidence["requests"]
    asked = (cell.path.server.model if cell.path.server else "") or server["model"]
    findings = []
    if not requests["ok"]:
        findings.append((Status.PATH_NOT_EXECUTED, f"no request was answered, {requests['failed']} failed"))
    elif not server["models_answered"]:
        findings.append((Status.PATH_NOT_EXECUTED, f"no answer named its model, so that nothing shows that {asked} gave it"))
    if others := sorted(set(server["models_answered"]) - {asked}):
        findings.append((Status.PATH_NOT_EXECUTED, f"{', '.join(others)} answered where {asked} was asked (path.server.model)"))
    if requests["failed"]:
        (status, reason), total = requests["failures"][0], requests["ok"] + requests["failed"]
        findings.append((Status(status), f"{requests['failed']} of {total} requests failed; the first: {reason}"))
    if requests["cached_tokens_max"] > MAX_SHARED_TOKENS:
        findings.append((Status.IMPLAUSIBLE, f"{requests['cached_tokens_max']} tokens of a fresh prompt came from the server's prompt cache"))
    return findings
