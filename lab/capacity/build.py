"""From a cell and a parsed config.json to its ledger. Runs in the ledger's own process: codecs and forward code need torch.

Everything is summed from single tensors, so that components, places and totals agree by construction. What the sums assume is written into the ledger
itself (`basis`, `notes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lab.capacity.inventory_sizes import FileEncoding, file_sizes
from lab.capacity.ledger import ACCOUNT_PARTS, Experts, Ledger, Line, Place
from lab.capacity.qwen4_exp import qwen4_exp_sizes
from lab.capacity.sizes import TRANSFORMERS, ModelSizes, transformer_sizes
from lab.capacity.storage import Encoding, Stored, is_vqf, stored
from lab.capacity.tiers import Strips, Tier, expert_residency, has_strip, strips_of, tier_of
from lab.capacity.traffic import Pass, Traffic, forward, rate_tok_s
from lab.capacity.workspace import workspace
from lab.cell import Cell
from lab.engines.strip_limits import MB
from lab.errors import LabError
from lab.measure.throughput import DECODE, LANES, PREFILL
from lab.measure.wide import passes
from lab.models.fields import Fields
from lab.models.qwen4_exp.table_rows import with_table_rows

STATE_TOKENS, STATE_BATCH = 4096, 4
"""The state a ledger makes room for, or more where the bench asks for longer contexts."""


def build(cell: Cell, data: dict[str, Any], where: str) -> Ledger:
    """The ledger of `cell`; `data` is the config.json at `where`. Raises LabError for sizes or codecs that do not go together."""
    return _counted(cell, _sizes(cell, data, where, getattr(torch, cell.device.compute_dtype)), {})


def build_of_file(cell: Cell, file: Path) -> Ledger:
    """The ledger of `cell` whose weights are in one file, counted as it stores them. Raises LabError."""
    return _counted(cell, *file_sizes(file, cell.model.arch, cell.layers, getattr(torch, cell.device.compute_dtype)))


def _counted(cell: Cell, sizes: ModelSizes, in_file: Mapping[str, Encoding]) -> Ledger:
    dtype = getattr(torch, cell.device.compute_dtype)
    tensors = stored(cell, sizes, in_file)
    tier, strips = tier_of(cell, sizes), strips_of(cell, tensors)
    one_memory = cell.device.torch_device == "cpu"
    lines = tuple(_lines(tensors, tier, strips))
    experts = _experts(tensors, sizes)
    residency = strips.residency if strips else ()
    if tier is not None and experts is not None:
        residency = (expert_residency(cell, tier, sizes, experts.layers * experts.count * experts.bytes_each),)
    context = PREFILL + DECODE // 2

    decode, lanes, prefill = Pass(1, 1, sizes.state_bytes(1, context)), Pass(LANES, LANES, sizes.state_bytes(LANES, context)), Pass(PREFILL, 1, 0)

    def traffic(work: Pass) -> Traffic:
        return forward(tensors, sizes, tier, strips, one_memory, work)

    def rate(work: Pass, least: bool) -> float | None:
        return rate_tok_s(traffic(replace(work, least=least)), cell.device, work.tokens, with_flops=work is prefill)

    one = traffic(decode)
    room = max([STATE_TOKENS, *(each.room for each in passes(cell.bench))])
    return Ledger(
        model=cell.model.name,
        path=cell.path.name,
        device=cell.device.name,
        layers=cell.layers,
        one_memory=one_memory,
        lines=lines,
        state_bytes=sizes.state_bytes(STATE_BATCH, room),
        state_basis=f"{STATE_BATCH} sequences of {room} tokens",
        workspace=workspace(cell, sizes, tensors, dtype.itemsize),
        experts=experts,
        residency=residency,
        device_limit_bytes=_budget(cell, cell.placement.device_budget_mb),
        host_limit_bytes=_budget(cell, cell.placement.host_budget_mb),
        decode_bytes_per_token=one.reads(),
        flops_per_token=one.flops,
        tg_bound_tok_s=rate(decode, least=True),
        agg4_bound_tok_s=rate(lanes, least=True),
        pp_bound_tok_s=rate(prefill, least=True),
        tg_estimate_tok_s=rate(decode, least=False),
        agg4_estimate_tok_s=rate(lanes, least=False),
        pp_estimate_tok_s=rate(prefill, least=False),
        basis=_basis(cell, experts, tier, context),
        assumed=tuple(_assumed(cell, tensors)),
        notes=tuple(_notes(cell, tensors, tier, strips)),
    )


def _sizes(cell: Cell, data: dict[str, Any], where: str, dtype: torch.dtype) -> ModelSizes:
    if cell.model.table_rows is not None:
        data = with_table_rows(data, cell.model.table_rows, where)
    if cell.model.arch == "qwen4_exp":
        return qwen4_exp_sizes(data, where, cell.layers, dtype)
    if cell.model.arch not in TRANSFORMERS:
        raise LabError(f"model.arch={cell.model.arch}: no list of tensors for this architecture")
    text = data.get("text_config", data) if isinstance(data, dict) else None
    if not isinstance(text, dict):
        raise LabError(f"{where}: expected an object of fields")
    return transformer_sizes(Fields(text, where), cell.model.arch, cell.layers, dtype.itemsize)


def _lines(tensors: Sequence[Stored], tier: Tier | None, strips: Strips | None) -> Iterator[Line]:
    """One line per component, encoding and place, in the order of `ACCOUNT_PARTS`; staging and strips last."""
    sums: dict[tuple[str, str, str, Place, bool], list[int]] = {}
    staging, kind = dict[str, int](), ""
    embedded = {t.weight.name: t.encoding.name for t in tensors if t.weight.kind == "embedding"}

    def add(one: Stored, placement: str, where: Place, copy: bool = False, experts: int | None = None) -> None:
        whole, held = one.weight.shape[0], one.weight.kind == "matrix" and embedded.get(one.weight.name) == one.encoding.name
        # A head that is the embedding, stored alike, is held once (lab.engines.path_binder).
        share = (one.weight.count, 0 if held else one.nbytes()) if experts is None else (one.weight.count * experts // whole, one.nbytes() * experts // whole)
        entry = sums.setdefault((one.weight.component, one.encoding.name, placement, where, copy), [0, 0])
        entry[0], entry[1] = entry[0] + share[0], entry[1] + share[1]

    for one in tensors:
        if one.weight.kind == "experts" and tier is not None:
            if one.weight.layer in tier.whole:
                add(one, "device", "device")
                continue
            add(one, one.placement, "host")
            if tier.slots:
                add(one, "slots", "device", copy=True, experts=tier.slots)
            staging[one.weight.name.rsplit(".", 1)[-1]] = one.nbytes() * tier.staged // tier.count
            kind = one.placement
        elif strips is not None and has_strip(one.weight):
            add(one, "file", "host")
        else:
            add(one, one.placement, "host" if one.placement == "host" else "device")
    for (component, codec, placement, where, copy), (weights, size) in sorted(sums.items(), key=lambda entry: ACCOUNT_PARTS.index(entry[0][0])):
        yield Line(component=component, codec=codec, placement=placement, where=where, weights=weights, bytes=size, copy_of_host=copy)
    if staging:
        yield Line(component="staging", codec="as the experts", placement=kind, where="device", weights=0, bytes=sum(staging.values()), copy_of_host=True)
    if strips is not None:
        caches: dict[Place, int] = {"host": strips.host, "device": strips.device}
        for place, size in ((place, size) for place, size in caches.items() if size):
            yield Line(component="strips", codec="int8 + float32 per 32", placement="cache", where=place, weights=0, bytes=size, copy_of_host=True)


def _experts(tensors: Sequence[Stored], sizes: ModelSizes) -> Experts | None:
    stacks = [t for t in tensors if t.weight.kind == "experts"]
    if not stacks:
        return None
    count, layers = stacks[0].weight.shape[0], len(sizes.expert_layers)
    return Experts(layers=layers, count=count, per_token=sizes.experts_per_token, bytes_each=sum(t.nbytes() for t in stacks) // (count * layers))


def _budget(cell: Cell, megabytes: int | None) -> int | None:
    """A budget limits what may lie at a place; that of a VQF cell limits its strip cache alone, which is counted already."""
    return None if megabytes is None or is_vqf(cell) else megabytes * MB


def _basis(cell: Cell, experts: Experts | None, tier: Tier | None, context: int) -> str:
    d = cell.device
    known = [
        f"{rate / scale:.4g} {unit}"
        for rate, scale, unit in ((d.read_bytes_s, 1e9, "GB/s read"), (d.flops_s, 1e12, "Tflop/s"), (d.bus_bytes_s, 1e9, "GB/s over the bus"))
        if rate is not None
    ]
    figures = ", ".join(known) or "no figures of this device"
    least = "; at the least: all tokens use the same experts" if experts else ""
    cached = ", and every slot holds one of them" if tier and tier.slots else ""
    return f"bytes read over bandwidth at {context} tokens of context, prefill of {PREFILL} tokens also operations over rate; {figures}{least}{cached}"


def _assumed(cell: Cell, tensors: Sequence[Stored]) -> Iterator[str]:
    """`component: type` of each component whose types only the file knows, where it is not at hand."""
    if not any(isinstance(t.encoding, FileEncoding) for t in tensors):
        for component, plan in cell.path.components.items():
            if plan.codec == "source" and plan.assumed and any(t.weight.component == component for t in tensors):
                yield f"{component}: {plan.assumed}"


def _notes(cell: Cell, tensors: Sequence[Stored], tier: Tier | None, strips: Strips | None) -> Iterator[str]:
    if cell.engine == "transformers":
        yield f"transformers holds every weight in {cell.device.compute_dtype}, which it computes in"
    elif any(plan.codec == "source" and not plan.assumed for plan in cell.path.components.values()):
        yield "source is counted as the release stores it: 16 bits, or e4m3 where its config.json says so"
    for component, plan in cell.path.components.items():
        codec, held = (plan.assumed if plan.codec == "source" else "") or plan.codec, {t.encoding.name for t in tensors if t.weight.component == component}
        if codec.startswith("gguf:") and codec in held and len(held) > 1:
            yield f"{component}: rows that {codec} cannot hold, or that have a type of their own, are {', '.join(sorted(held - {codec}))}"
    for assumption in _assumed(cell, tensors):
        yield f"{assumption} is assumed; the file itself, where it is at hand, says what it holds"
    if tier is not None and (asked := cell.placement.resident_layers or 0) > cell.layers:
        yield f"placement.resident_layers={asked}: all {cell.layers} layers, which is the same cell as with {cell.layers}"
    placements = {t.placement for t in tensors if t.weight.kind == "experts"} if tier is not None and tier.partial else set()
    if placements:
        yield "streamed experts pass through a staging area of one layer; host memory holds every layer that is not whole on the device"
    if "cpu_cold" in placements:
        yield "the CPU reads the cold experts itself, and no device file has a figure for that: no estimates, and bounds only where slots can hold all in use"
    if strips is not None and len(strips.residency) > 1:
        yield "the strip cache is that of the CPU engine; the CUDA port is not public, so that its residency is inferred"
        yield "strips that do not stay on the device are moved there again in every pass"
    if is_vqf(cell):
        yield "text model alone: a file with a vision tower is larger"
