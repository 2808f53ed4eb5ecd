"""Likeness: whether two numbers of one metric may be set against each other, and what else differs beside them.

One answer for the report, the verdicts, `compare` and the rules across cells. What moves a number without being what the numbers are about - device,
amount of measuring, protocol, text, cache; for everything timed also the machine and torch - must agree, or the two are not compared. Code, weights,
environment and warnings of the machine may be what somebody compares on purpose; a difference in them is said beside the comparison. Only what records
hold can be looked at: two attempts that are alike here can still have run on a hot and on a cool machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lab.metrics import METRICS
from lab.record import Measurement, Record
from lab.stats import Comparison, Difference, compare_estimates, compare_samples

_SHARES_AND_MEMORY = ("peak_memory_bytes", "gemm_share", "decode_experts_share", "prefill_experts_share")
OF_THE_MACHINE = frozenset(name for name, metric in METRICS.items() if metric.unit in ("tok/s", "s", "x") or name in _SHARES_AND_MEMORY)
"""Metrics that another machine or another torch moves by more than rounding: everything timed, and the memory a process takes."""
_DEVICE = ("name", "torch_device", "compute_dtype", "threads")
_BENCH_IDLE = ("name", "timeout_s", "llama_half_chunks", "llama_half_context", "prefill_tokens", "decode_depths", "wide_lanes", "segment_layers")
"""Fields of a bench that move no number, or only one whose details say so (`_TAKEN`)."""
_TAKEN = ("bos", "chunks", "context", "cache_state", "corpus", "corpus_sha256", "context_tokens", "requested_tokens")
"""Details of a measurement that must agree."""
_NEEDED = ("machine.cpu", "machine.cores")
"""Where both records leave these out, nobody knows that it was one machine."""
_HASH_SHOWN = 12


@dataclass(frozen=True)
class Unlike:
    """One thing in which two records differ, or that neither tells; None stands for not recorded."""

    what: str
    a: Any
    b: Any

    def __str__(self) -> str:
        """As a clause of a sentence."""
        if self.a is None and self.b is None:
            return f"{self.what} is recorded by neither"
        return f"{self.what} differs: {_say(self.a, 'not recorded')} and {_say(self.b, 'not recorded')}"

    @property
    def brief(self) -> str:
        """Without words of any language."""
        return f"{self.what} ({_say(self.a, '–')} / {_say(self.b, '–')})"


def unlike(a: Record, b: Record, metric: str) -> list[Unlike]:
    """What forbids setting the two records' numbers of `metric` against each other; empty where nothing does.

    Raises KeyError where one of them has no such number.
    """
    found = list(_differing(circumstances(a, metric), circumstances(b, metric)))
    missing = [Unlike(key, None, None) for key in untold(a, metric) if key in untold(b, metric)]
    return [*found, *missing, *_differing(_taken(a.metrics[metric]), _taken(b.metrics[metric]))]


def circumstances(record: Record, metric: str) -> dict[str, Any]:
    """What must be equal around a number of `metric`, by name, as the record tells it."""
    device, bench = record.cell["device"], record.cell["bench"]
    found = {f"device.{key}": device.get(key) for key in _DEVICE}
    found |= {f"bench.{key}": value for key, value in sorted(bench.items()) if key not in _BENCH_IDLE}
    return found | machine(record) if metric in OF_THE_MACHINE else found


def machine(record: Record) -> dict[str, Any]:
    """The hardware that the cell's device is part of, and the stack under the lab's code. Kernel release and memory size move no rate by themselves."""
    told, packages = record.provenance.get("machine") or {}, record.provenance.get("packages") or {}
    on_cpu = record.cell["device"].get("torch_device") == "cpu"
    return {
        "machine.cpu": told.get("cpu"),
        "machine.cores": told.get("cores"),
        "machine.accelerators": [] if on_cpu else told.get("accelerators"),
        "torch": packages.get("torch"),
        "triton": packages.get("triton"),
    }


def untold(record: Record, metric: str) -> list[str]:
    """What the record would have to tell for its numbers of `metric` to be set against any other's, and does not."""
    found = circumstances(record, metric)
    return [key for key in _NEEDED if key in found and found[key] is None]


def beside(a: Record, b: Record) -> list[Unlike]:
    """What else differs between the two and may be behind a difference of their numbers: to be said, not to refuse."""
    sides = []
    for record in (a, b):
        environment = {f"env.{key}": value for key, value in sorted((record.provenance.get("env") or {}).items())}
        used = (record.provenance.get("environment") or {}).get("threads_used") or {}
        threads = {f"threads for {phase}": used.get(phase) for phase in ("prompts", "steps") if used}
        code, weights = record.provenance.get("code_sha256"), record.artifact.get("sha256")
        sides.append({"code": _start(code), "weights": _start(weights), **machine(record), **threads, **environment})
    return [*_differing(*sides), *_warned(a, b)]


def contrast(a: Measurement, b: Measurement) -> Comparison | Difference | None:
    """The statistics over two measurements of one metric: repeats by their ranks, estimates by their errors; None where there are neither."""
    if a.samples and b.samples and min(*a.samples, *b.samples) > 0:
        return compare_samples(a.samples, b.samples)
    if a.stderr is not None and b.stderr is not None and a.stderr + b.stderr > 0:
        return compare_estimates(a.value, a.stderr, b.value, b.stderr)
    return None


def _taken(found: Measurement) -> dict[str, Any]:
    """How the number was taken."""
    return {"protocol": found.protocol, "unit": found.unit} | {key: found.details.get(key) for key in _TAKEN}


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Unlike]:
    for key in dict.fromkeys((*a, *b)):
        if a.get(key) != b.get(key):
            yield Unlike(key, a.get(key), b.get(key))


def _warned(a: Record, b: Record) -> Iterator[Unlike]:
    """Checks of the machine that warned on one side only."""
    sides = [_warnings(record) for record in (a, b)]
    for name in sorted(sides[0].keys() ^ sides[1].keys()):
        told = [side.get(name, "no warning" if record.provenance.get("machine_state") else None) for side, record in zip(sides, (a, b), strict=True)]
        yield Unlike(f"machine_state.{name}", *told)


def _warnings(record: Record) -> dict[str, str]:
    """What each check that was not content found, before the attempt or else after it."""
    state = record.provenance.get("machine_state") or {}
    sides = [side for when in ("after", "before") if isinstance(side := state.get(when), dict)]
    looks = [(name, look) for side in sides for name, look in side.items() if isinstance(look, dict)]
    return {name: str(look.get("found")) for name, look in looks if look.get("state") in ("warn", "bad")}


def _start(digest: str | None) -> str | None:
    return digest and digest[:_HASH_SHOWN]


def _say(value: Any, missing: str) -> str:
    return missing if value is None else ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
