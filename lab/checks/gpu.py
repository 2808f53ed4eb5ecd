"""One GPU as a tool or the kernel describes it now, whatever its maker, and what was seen of all of them.

A field is None where nothing tells. The order of the cards is that of the tool, which need not be torch's; so all are looked at, also one that the cell
will not use.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Memory in bytes, clocks of the compute units in MHz, temperature in degrees Celsius, power in watts.

    `limits` are the things that hold its clock down now, each in words.
    """

    name: str
    used_bytes: int | None = None
    total_bytes: int | None = None
    clock_mhz: float | None = None
    max_clock_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    limits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Seen:
    """All GPUs of one maker. `tool` is what was asked, `driver` its driver's version, `processes` those that use a GPU, `trouble` why nothing was seen."""

    tool: str
    driver: str | None = None
    gpus: tuple[Gpu, ...] = ()
    processes: tuple[str, ...] = ()
    trouble: str = ""
