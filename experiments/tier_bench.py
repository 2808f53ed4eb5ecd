"""Checks what tiers are made of against plain references, then times it: `python -m experiments.tier_bench [--out FILE]`.

Slot tables, copies of experts from pinned memory, the CPU's job and its way into a step: the parts whose sum a cell of path=tiered or path=cpu_cold shows.
A failed check ends the run before anything is timed. Copies stand beside the driver's own copy of one large piece in the same run, the CPU's job beside the
rate at which the same threads read memory. `--check` stops after the checks, which also run without a GPU (kernels in Triton's interpreter).
What it does not prove: the speed of a token, in which these parts overlap with kernels; hit rates, which are the text's.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from experiments.kernel_bench import graph_us
from lab.codecs import create
from lab.kernels.backend import interpreted
from lab.kernels.experts import LowBitExperts, reference_experts
from lab.kernels.native.cold import TOTALS, Job, Office, Stack
from lab.kernels.planes import Planes, repack
from lab.kernels.slots import SlotTables, assign, copy_experts, reference_assign
from lab.kernels.verify import poisoned, random_ids, random_parts, relative_error
from lab.placement.cold_kernels import hand_over, promote, reference_step, summed
from lab.placement.cold_link import Link
from lab.placement.pinned import PinnedMemory
from lab.placement.rooms import Room, expert_parts, expert_units, words_of

HIDDEN, WIDTH, EXPERTS, TOPK = 2560, 640, 512, 10
CODECS = ("w3_levels", "q2_g32", "q2_levels")
TOLERANCE = 3e-4  # of the CPU's job in float32: levels as float8_e5m2 times a factor are within 2.2e-4
REPEATS = 15
CAPTURED = 16
"""Calls in one graph, as in a step: launched one by one, each of them takes 50 us of the host's time."""
Check = tuple[str, str | None]
"""(what, what was wrong, or None)."""
Row = dict[str, Any]
"""{name, us: samples, bytes: moved or read, bound_bytes_s: what the rate stands beside, or None}."""


def tables(experts: int, slots: int, device: torch.device) -> SlotTables:
    """Empty tables that count."""
    return SlotTables.empty(experts, slots, device, torch.ones(1, dtype=torch.int64, device=device))


def on_cpu(one: SlotTables) -> SlotTables:
    """A copy for plain Python."""
    made = copy.deepcopy(one)
    for name in vars(made):
        setattr(made, name, getattr(made, name).cpu())
    return made


def _differs(one: SlotTables, other: SlotTables) -> str | None:
    wrong = [name for name in vars(other) if name != "counts" and not torch.equal(getattr(one, name).cpu(), getattr(other, name))]
    wrong += ["counts"] * (one.counts.tolist()[:3] != other.counts.tolist()[:3])
    return f"{', '.join(wrong)} differ" if wrong else None


def check_tables(experts: int, slots: int, tokens: int, k: int, steps: int, device: torch.device) -> Iterator[Check]:
    """Both kinds of step against plain Python, on streams that come back to a third of the experts."""
    name = f"{slots} slots of {experts}, {tokens} x {k}"
    for kind in ("tiered", "cpu_cold"):
        mine = tables(experts, slots, device)
        plain, wrong = on_cpu(mine), None
        for step in range(steps):
            ids = random_ids(tokens, experts, k, str(device))
            ids = torch.where(torch.rand(ids.shape, device=device) < 0.5, ids % max(k, experts // 3), ids)
            ids[0, 0] = -1 if step % 5 == 0 else ids[0, 0]
            with poisoned():
                if kind == "tiered":
                    found, copies = assign(ids, mine)
                    got: Any = (found.flatten().tolist(), copies.flatten().tolist())
                    want: Any = reference_assign([int(i) for i in ids.flatten()], plain)
                else:
                    x, weights = torch.randn(tokens, 8, device=device).half(), torch.rand(tokens, k, device=device)
                    outs = torch.empty_like(x), torch.empty_like(ids), torch.empty_like(weights)
                    places = hand_over(x, ids, weights, mine, outs)
                    got = places.tolist(), promote(ids, places, mine, 2)[0].tolist()
                    want = reference_step(ids.tolist(), plain, 2)[:2]
                    if not (torch.equal(outs[0], x) and torch.equal(outs[1], torch.where(places >= 0, -1, ids)) and torch.equal(outs[2], weights)):
                        wrong = wrong or f"step {step}: what was handed over differs"
            wrong = wrong or (f"step {step}: slots or copies differ" if got != want else _differs(mine, plain))
        yield f"{kind} tables, {name}, {steps} steps", wrong


def stacks(codec_name: str, experts: int, hidden: int, width: int, device: str) -> tuple[tuple[Planes, Planes], tuple[Tensor, Tensor]]:
    """Both stacks of a layer as kernels read them, and the same weights decoded to float32."""
    codec = create(codec_name)
    first, second = (random_parts(codec, shape, device) for shape in ((experts, 2 * width, hidden), (experts, hidden, width)))
    return (repack(codec, first, hidden, halves=2), repack(codec, second, width)), (codec.decode(first, hidden), codec.decode(second, width))


def check_copies(hidden: int, width: int, device: torch.device) -> Check:
    """Every byte of the experts that were brought, and none of the others."""
    (first, second), _ = stacks("w3_levels", 12, hidden, width, str(device))
    kernel, room = LowBitExperts(first, second), Room.like(LowBitExperts(first, second), 6)
    for part in (*room.parts, *room.units):
        part.fill_(-7)
    source = pinned_copies(PinnedMemory(device), kernel)
    mine = tables(12, 6, device)
    found, copies = assign(torch.tensor([[11, 0, 5]], device=device), mine)
    copy_experts(copies, found, mine, source, room.parts, [*expert_units(kernel), *room.units])
    held = dict(zip(found.flatten().tolist(), (11, 0, 5), strict=True))
    wrong = [
        slot
        for slot in range(6)
        for part, to in zip([*source, *expert_units(kernel)], [*room.parts, *room.units], strict=True)
        if not torch.equal(to[slot].cpu(), part[held[slot]].cpu() if slot in held else torch.full_like(to[slot].cpu(), -7))
    ]
    return f"copies of experts {hidden}/{width}", f"slots {sorted(set(wrong))} differ" if wrong else None


def pinned_copies(memory: PinnedMemory, kernel: LowBitExperts) -> list[Tensor]:
    """The kernel's parts as words [E, n] in pinned host memory."""
    found = []
    for part in map(words_of, expert_parts(kernel)):
        found.append(memory.empty(tuple(part.shape), part.dtype, "experts"))
        found[-1].copy_(part)
    return found


def check_job(codec: str, hidden: int, width: int, tokens: int) -> Check:
    """The CPU's job against plain torch, and what it counts."""
    planes, decoded = stacks(codec, 16, hidden, width, "cpu")
    office, totals = Office(max(1, torch.get_num_threads() - 1)), torch.zeros(len(TOTALS), dtype=torch.int64)
    x, ids, weights = torch.randn(tokens, hidden).bfloat16(), random_ids(tokens, 16, 4, "cpu"), torch.rand(tokens, 4)
    ids[0, 0] = -1
    y = torch.full((tokens, hidden), float("nan"))
    office.run(Job(office, (Stack(planes[0], 2), Stack(planes[1], 1)), x, ids, weights, y, totals))
    error = relative_error(y, reference_experts(x.float(), ids, weights, *decoded))
    counted = dict(zip(TOTALS, totals.tolist(), strict=True))
    wrong = f"relative error {error:.1e}" if not error < TOLERANCE else None
    return f"CPU job {codec} {hidden}/{width} M={tokens}", wrong or (None if counted["pairs"] == int((ids >= 0).sum()) else f"counted {counted['pairs']} pairs")


def check_sum(device: torch.device) -> Check:
    """Both halves, added and rounded once."""
    hot, cold = (torch.randn(3, 1100, device=device) for _ in range(2))
    with poisoned():
        right = torch.equal(summed(hot, cold, torch.float16, device), (hot + cold).half())
    return "sum of both halves", None if right else "differs"


def checks(device: torch.device) -> Iterator[Check]:
    """All of them: true sizes on a GPU, small ones in the interpreter."""
    gpu = device.type == "cuda"
    sizes = ((EXPERTS, 256, 1, TOPK), (EXPERTS, 64, 4, TOPK), (EXPERTS, 512, 4, TOPK), (37, 11, 1, 5)) if gpu else ((37, 11, 1, 5), (23, 19, 4, 4))
    for experts, slots, tokens, k in sizes:
        yield from check_tables(experts, slots, tokens, k, 120 if gpu else 8, device)
    hidden, width = (HIDDEN, WIDTH) if gpu else (128, 64)
    yield check_copies(hidden, width, device)
    yield check_sum(device)
    for codec in CODECS:
        for tokens in (1, 5):
            yield check_job(codec, hidden, width, tokens)


def timed(call: Callable[[], object], clear: Callable[[], object] = lambda: None) -> list[float]:
    """Microseconds on the device of each of REPEATS calls after two; `clear` comes before each and is not timed."""
    samples = []
    for _ in range(REPEATS + 2):
        clear()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        samples.append(1000 * start.elapsed_time(end))
    return samples[2:]


def bus_rows(device: torch.device) -> Iterator[Row]:
    """Copies of experts beside the driver's copy of as much as one layer; the tables; registering memory."""
    (first, second), _ = stacks("w3_levels", 64, HIDDEN, WIDTH, str(device))
    kernel = LowBitExperts(first, second)
    memory = PinnedMemory(device)
    source, room = pinned_copies(memory, kernel), Room.like(kernel, 64)
    layer = sum(part.nbytes for part in source)
    whole = timed(lambda: [to.copy_(part, non_blocking=True) for part, to in zip(source, room.parts, strict=True)])
    bound = layer / (min(whole) * 1e-6)
    yield {"name": "the driver's copy of 64 experts", "us": whole, "bytes": layer, "bound_bytes_s": None}
    mine = tables(64, 64, device)
    for count in (1, 2, 5, 10, 40):
        copies = torch.arange(count, dtype=torch.int32, device=device)
        units = [*expert_units(kernel), *room.units]
        us = graph_us([partial(copy_experts, copies, copies, mine, source, room.parts, units)] * CAPTURED)
        yield {"name": f"copies of {count} experts", "us": us, "bytes": layer // 64 * count, "bound_bytes_s": bound}
    for slots, tokens in ((256, 1), (64, 4)):
        steps, held = [random_ids(tokens, EXPERTS, TOPK, str(device)) for _ in range(CAPTURED)], tables(EXPERTS, slots, device)
        us = graph_us([partial(assign, ids, held) for ids in steps])
        yield {"name": f"tables, {slots} slots, {tokens} x {TOPK}", "us": us, "bytes": None, "bound_bytes_s": None}
    size, before = 1 << 32, memory.seconds
    memory.empty((size,), torch.uint8, "a trial")
    yield {"name": "4 GiB touched and registered", "us": [1e6 * (memory.seconds - before)], "bytes": size, "bound_bytes_s": None}


def cpu_rows() -> Iterator[Row]:
    """The CPU's job for a token's experts, other experts in every call, beside the rate at which the same threads read."""
    for codec in CODECS:
        planes, _ = stacks(codec, 128, HIDDEN, WIDTH, "cpu")
        pair = Stack(planes[0], 2), Stack(planes[1], 1)
        office = Office(max(1, 3 * torch.get_num_threads() // 4))
        bound = max(office.read_bytes_s(planes[0].words) for _ in range(3))
        x, y = torch.randn(1, HIDDEN).bfloat16(), torch.empty(1, HIDDEN)
        for count in (1, 2, 5, 10):
            samples = []
            for number in range(REPEATS + 2):
                ids = ((torch.arange(count, dtype=torch.int32) + number * count) % 128)[None]
                totals = torch.zeros(len(TOTALS), dtype=torch.int64)
                office.run(Job(office, pair, x, ids, torch.rand(1, count), y, totals))
                samples.append(1e-3 * int(totals[TOTALS.index("ns")]))
            nbytes = count * sum(one.bytes_per_expert for one in pair)
            yield {"name": f"CPU job {codec}, {count} experts, {office.threads} threads", "us": samples[2:], "bytes": nbytes, "bound_bytes_s": bound}


def join_rows(device: torch.device) -> Iterator[Row]:
    """An empty job called from a captured graph and waited for, by each way that there is."""
    planes, _ = stacks("q2_g32", 4, 64, 64, "cpu")
    memory = PinnedMemory(device)
    for bell in (True, False):
        office, totals = Office(2), torch.zeros(len(TOTALS), dtype=torch.int64)
        numbers = torch.empty(0, 64), torch.empty(0, 1, dtype=torch.int32), torch.empty(0, 1), torch.empty(0, 64)
        job = Job(office, (Stack(planes[0], 2), Stack(planes[1], 1)), *numbers, totals)
        link = Link(office, device, memory, job, lambda totals=totals: int(totals[0]), bell=bell)  # type: ignore[misc]
        if link.mode not in ("bell", "host node"):
            yield {"name": f"joined without a captured step: {link.reason}", "us": [], "bytes": None, "bound_bytes_s": None}
            continue
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(8):
                link.start(job)
                link.join(job)
        yield {"name": f"joined by {link.mode}, empty job", "us": [us / 8 for us in timed(graph.replay)], "bytes": None, "bound_bytes_s": None}


def told(row: Row) -> str:
    """One line."""
    if not row["us"]:
        return str(row["name"])
    us, text = median(row["us"]), ""
    if row["bytes"]:
        text = f"{row['bytes'] / us / 1000:8.1f} GB/s"
        if row["bound_bytes_s"]:
            text += f" {row['bytes'] / (us * 1e-6) / row['bound_bytes_s']:6.1%}"
    return f"{row['name']:44s} {us:12.2f} us [{min(row['us']):.2f}, {max(row['us']):.2f}] {text}"


def main() -> int:
    """Exit code 0 where every check was green, 1 where one was red, 2 without a GPU (unless --check)."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="checks alone")
    parser.add_argument("--out", type=Path, help="write all samples there as JSON")
    asked = parser.parse_args()
    if not torch.cuda.is_available() and not (asked.check and interpreted()):
        print("tier_bench needs a GPU that torch sees; without one: TRITON_INTERPRET=1 python -m experiments.tier_bench --check", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = list(checks(device))
    failed = [(name, wrong) for name, wrong in found if wrong is not None]
    for name, wrong in failed:
        print(f"WRONG {name}: {wrong}")
    print(f"checks: {len(found) - len(failed)} of {len(found)} right")
    if failed or asked.check:
        return 1 if failed else 0
    rows = []
    for rows_of in (lambda: bus_rows(device), cpu_rows, lambda: join_rows(device)):
        for row in rows_of():
            print(told(row), flush=True)
            rows.append(row)
    if asked.out:
        asked.out.write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
