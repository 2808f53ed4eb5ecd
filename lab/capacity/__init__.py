"""What a cell needs before anything loads: bytes per component and place, bounds, a verdict, and what would make it fit.

Everything here is counted from sizes and codecs; nothing was loaded or measured. The parent process may import it: what needs torch runs in a process of its
own (`lab.capacity.service`).
"""

from __future__ import annotations

from lab.capacity.accounts import Derivation, DerivedTerm, derive
from lab.capacity.fit import Suggestion, largest_tiers, what_would_fit
from lab.capacity.ledger import ACCOUNT_PARTS, Ledger, Line, NoLedger, Reads, Residency
from lab.capacity.memory import is_here, machine_memory
from lab.capacity.past import Estimate, Estimates, PastOom, capacity_evidence, estimate_with_memory, needed_bytes, past_ooms, place_out_of_memory
from lab.capacity.service import ledgers
from lab.capacity.verdict import Verdict, judge

__all__ = [
    "ACCOUNT_PARTS",
    "Derivation",
    "DerivedTerm",
    "Estimate",
    "Estimates",
    "Ledger",
    "Line",
    "NoLedger",
    "PastOom",
    "Reads",
    "Residency",
    "Suggestion",
    "Verdict",
    "capacity_evidence",
    "derive",
    "estimate_with_memory",
    "is_here",
    "judge",
    "largest_tiers",
    "ledgers",
    "machine_memory",
    "needed_bytes",
    "past_ooms",
    "place_out_of_memory",
    "what_would_fit",
]
