"""The verb `doctor`: is this machine ready to measure, and if not, what would make it so.

It prints the checks that `run` makes (`lab.checks`), and those that take too long for a run: what device=auto means, and the records. It measures
nothing, and a machine it calls ready can still be too small.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

from lab.checks import Check, machine_checks
from lab.checks.device import auto
from lab.checks.source import Source
from lab.checks.stores import records
from lab.project import Project
from lab.reconcile import reconcile
from lab.store import Store

WIDTH = 80
_LABELS = {"ok": "ok", "warn": "WARN", "bad": "BAD", "unknown": "?"}


def examine(project: Project, source: Source | None = None) -> bool:
    """Close attempts of killed processes, print one entry per check, and return True unless something is bad."""
    closed = reconcile(Store(project.runs))
    source = source or Source()
    checks = [*machine_checks(project, None, source), auto(source), records(project, len(closed))]
    print("\n".join(lines(checks)))
    return not any(check.state == "bad" for check in checks)


def lines(checks: Sequence[Check]) -> list[str]:
    """The checks as text, WIDTH columns wide, each fix on lines of its own, and a verdict at the end."""
    column = max(len(check.name) for check in checks)
    printed = []
    for check in checks:
        head = f"{_LABELS[check.state]:4}  {check.name:{column}}  "
        printed += _wrapped(head, check.found)
        printed += _wrapped(" " * len(head) + "fix: ", check.fix) if check.fix else []
    counts = Counter(check.state for check in checks)
    verdict = "not ready to measure" if counts["bad"] else "ready to measure"
    return [*printed, f"{verdict} (bad: {counts['bad']}, warnings: {counts['warn']}, not known: {counts['unknown']})"]


def _wrapped(head: str, text: str) -> list[str]:
    """`text` after `head`, further lines indented below it. Paths and versions are not broken, however long."""
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False, break_on_hyphens=False)
