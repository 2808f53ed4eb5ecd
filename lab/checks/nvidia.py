"""NVIDIA GPUs as nvidia-smi describes them: memory, clocks, what holds the clocks down, processes.

nvidia-smi is asked twice, for cards and for processes, about 0.03 s each. In a container it cannot name the processes of others, so memory in use
counts even when no process is listed.
Sources: nvidia-smi --help-query-gpu; nvml.h, nvmlClocksEventReasons, for the bits.
"""

from __future__ import annotations

import re

from lab.checks.check import size
from lab.checks.gpu import Gpu, Seen
from lab.checks.source import AbsentError, Source, UnseenError

TOOL = "nvidia-smi"
_CARD = (
    *("index", "name", "driver_version", "memory.total", "memory.used", "clocks.sm", "clocks.max.sm"),
    *("temperature.gpu", "power.draw", "power.limit", "power.default_limit", "clocks_throttle_reasons.active"),
)
"""`clocks_throttle_reasons` has since been renamed to `clocks_event_reasons`; drivers before 535 know only the old name, later ones both."""
_PROCESS = ("pid", "used_memory", "process_name")
_REASONS = {
    0x2: "application clocks set below the maximum",
    0x4: "power cap (software)",
    0x8: "hardware slowdown",
    0x10: "sync boost with a slower GPU",
    0x20: "too hot (software)",
    0x40: "too hot (hardware)",
    0x80: "external power brake",
    0x100: "display clock setting",
}
"""Bit 0x1 is an idle GPU, which is no limit."""


def look(source: Source) -> Seen | None:
    """The GPUs, or the trouble nvidia-smi has; None where neither it nor NVIDIA's driver is installed."""
    try:
        cards = _query(source, "--query-gpu", _CARD)
        processes = _query(source, "--query-compute-apps", _PROCESS)
    except UnseenError as error:
        if isinstance(error, AbsentError) and _module_version(source) is None:
            return None
        return Seen(TOOL, _module_version(source), trouble=str(error))
    return Seen(TOOL, cards[0]["driver_version"] if cards else None, tuple(map(_gpu, cards)), tuple(map(_process, processes)))


def free_bytes(source: Source) -> list[int | None]:
    """Free bytes of each card in the tool's order, None where it does not tell; empty where nothing can be asked. Less than total minus used: the driver
    reserves a part."""
    try:
        return [_bytes(card["memory.free"]) for card in _query(source, "--query-gpu", ("memory.free",))]
    except UnseenError:
        return []


def _query(source: Source, what: str, fields: tuple[str, ...]) -> list[dict[str, str]]:
    """One row per line of the answer. Raises UnseenError, also for an answer that is no such table."""
    answer = source.ask((TOOL, f"{what}={','.join(fields)}", "--format=csv,noheader,nounits"))
    # The name of a process, the last field, may hold commas itself.
    rows = [line.split(", ", len(fields) - 1) for line in answer.splitlines() if line.strip()]
    if any(len(row) != len(fields) for row in rows):
        raise UnseenError(f"{TOOL} gave an answer of another shape: {' '.join(answer.split())[:120]}")
    return [dict(zip(fields, row, strict=True)) for row in rows]


def _gpu(card: dict[str, str]) -> Gpu:
    limit, default_limit, reasons = _number(card["power.limit"]), _number(card["power.default_limit"]), card["clocks_throttle_reasons.active"]
    limits = [text for bit, text in _REASONS.items() if re.fullmatch(r"0x[0-9a-fA-F]+", reasons) and int(reasons, 16) & bit]
    if limit is not None and default_limit is not None and limit < default_limit:
        limits.append(f"power limit {limit:g} W, by default {default_limit:g} W")
    return Gpu(
        name=f"GPU {card['index']} {card['name']}",
        used_bytes=_bytes(card["memory.used"]),
        total_bytes=_bytes(card["memory.total"]),
        clock_mhz=_number(card["clocks.sm"]),
        max_clock_mhz=_number(card["clocks.max.sm"]),
        temperature_c=_number(card["temperature.gpu"]),
        power_w=_number(card["power.draw"]),
        power_limit_w=limit,
        limits=tuple(limits),
    )


def _process(process: dict[str, str]) -> str:
    name, used = process["process_name"].rsplit("/", 1)[-1], _bytes(process["used_memory"])
    return f"{name} (pid {process['pid']}{'' if used is None else f', {size(used)}'})"


def _number(text: str) -> float | None:
    """The number, or None for `[N/A]`, `[Not Supported]` and the like."""
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None


def _bytes(mib: str) -> int | None:
    number = _number(mib)
    return None if number is None else int(number * (1 << 20))


def _module_version(source: Source) -> str | None:
    """The version of the kernel module that is loaded."""
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+[.\d]*)\s", source.text("proc/driver/nvidia/version") or "")
    return found.group(1) if found else None
