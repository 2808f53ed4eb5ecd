"""Every matrix product of a dense transformer on its own, device against CPU, protocol `verify@1`.

Each matrix gets the same random rows on both sides, and all outputs are compared: a matrix that a kernel or a layout reads wrongly is named, where a
perplexity would only be a little worse. One row and four go through what decodes - where a captured step joins matrices into one launch, through that launch -
and seventeen through what prefills. It does not compare attention, norms or the cache; greedy ids and likelihoods do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lab.engines.graphs import MOST_SEQUENCES
from lab.engines.local import LocalEngine
from lab.errors import GapError
from lab.metrics import METRICS
from lab.models import Model
from lab.models.transformer.mlp import DenseMlp
from lab.models.transformer.model import Transformer
from lab.record import Measurement, Status

ROWS = (1, 4, 17)
"""Rows of activations in the calls: as many sequences as are decoded in a cell, and more than any kernel of decoding takes (lab.ops.MAX_NATIVE_ROWS)."""

TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
"""By the device's compute dtype. bfloat16: the output alone is rounded by 2^-9 of itself, and one of 40,000 normal outputs reaches 4 to 5 times the row's
rms (0.9 %); decoded weights are rounded by as much, which adds about 0.2 % of the rms, five times that in the worst of as many. float32: sums of
10^4 terms in another order stay two orders below."""


@dataclass(frozen=True)
class Product:
    """One matrix of the model: the operation is attribute `attribute` of `owner` and takes rows of `width` numbers."""

    name: str
    kind: str
    owner: Any
    attribute: str
    width: int


def products(model: Model) -> Iterator[Product]:
    """All matrices, layer by layer, then the head. Raises GapError (UNSUPPORTED) for a model that is no dense transformer."""
    if not isinstance(model, Transformer) or any(not isinstance(layer.mlp, DenseMlp) for layer in model.layers):
        raise GapError(Status.UNSUPPORTED, "the measures of a stage know the matrices of dense transformers only")
    sizes = model.config
    for index, layer in enumerate(model.layers):
        for name in ("q", "k", "v", "o"):
            width = sizes.num_heads * sizes.head_dim if name == "o" else sizes.hidden_size
            yield Product(f"layers.{index}.self_attn.{name}_proj", "attention", layer.attention, name, width)
        for name in ("gate", "up", "down"):
            yield Product(f"layers.{index}.mlp.{name}_proj", "mlp", layer.mlp, name, sizes.mlp_width if name == "down" else sizes.hidden_size)
    yield Product("lm_head", "head", model, "head", sizes.hidden_size)


Stack = tuple[Any, str, str, tuple[str, ...], tuple[int, ...]]
"""(holder, attribute, kind, names of the matrices, rows of each) of a step's operation that multiplies several matrices in one launch."""


def stacked_products(step: Any) -> list[Stack]:
    """Those of a transformer's decode step, in the order of layers; empty for any other step, or None."""
    found: list[Stack] = []
    for index, layer in enumerate(getattr(step, "layers", ())):
        for holder, attribute, kind, names, rows in layer.stacked():
            part = "self_attn" if kind == "attention" else "mlp"
            found.append((holder, attribute, kind, tuple(f"layers.{index}.{part}.{name}_proj" for name in names), rows))
    return found


def decoding(engine: LocalEngine) -> dict[str, Callable[[Tensor], Tensor]]:
    """{name: rows [n, in] -> outputs [n, out]} of the matrices that decoding multiplies together with others."""
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    for holder, attribute, _, names, rows in stacked_products(engine.graphs.plain_step()):
        for place, name in enumerate(names):
            start = sum(rows[:place])
            found[name] = partial(_slice, getattr(holder, attribute), start, start + rows[place])
    return found


def _slice(operation: Callable[[Tensor], Tensor], start: int, stop: int, x: Tensor) -> Tensor:
    return operation(x)[..., start:stop]


def random_rows(name: str, rows: int, width: int) -> Tensor:
    """float32 [rows, width], normal, the same for the same arguments everywhere; values that bfloat16 holds exactly, so that both sides read the same."""
    seed = int.from_bytes(hashlib.sha256(f"{name} {rows}".encode()).digest()[:6], "little")
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


@torch.no_grad()
def random_outputs(engine: LocalEngine) -> dict[str, Tensor]:
    """{name: float32 [sum of ROWS, out], on the CPU}: every matrix applied to its random rows. These calls belong to no token and are not counted."""
    found, together = {}, decoding(engine)
    with engine.counters.recording():
        for product in products(engine.model):
            operation = getattr(product.owner, product.attribute)
            outputs = []
            for rows in ROWS:
                x = random_rows(product.name, rows, product.width).to(engine.device, engine.dtype)
                used = together.get(product.name, operation) if rows <= MOST_SEQUENCES else operation
                outputs.append(used(x).float().cpu())
            found[product.name] = torch.cat(outputs)
    return found


def compare(cpu: dict[str, Tensor], device: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """{name: {max, mean}}: |device - CPU| over the rms of the CPU's output row, over all outputs. Raises ValueError, naming the matrix, where the sides do not
    have the same matrices or an output is not finite."""
    if cpu.keys() != device.keys():
        raise ValueError(f"the sides have different matrices: {sorted(cpu.keys() ^ device.keys())[0]}")
    found = {}
    for name, expected in cpu.items():
        if expected.shape != device[name].shape:
            raise ValueError(f"{name}: {tuple(device[name].shape)} outputs on the device, {tuple(expected.shape)} on the CPU")
        scale = expected.double().square().mean(-1, keepdim=True).sqrt().clamp_min(torch.finfo(torch.float32).tiny)
        error = (device[name].double() - expected.double()).abs() / scale
        if not bool(torch.isfinite(error).all()):
            raise ValueError(f"{name}: an output is not finite")
        found[name] = {"max": float(error.max()), "mean": float(error.mean())}
    return found


def verify_metric(cpu: dict[str, Tensor], device: dict[str, Tensor], dtype: torch.dtype, joined: int = 0) -> Measurement:
    """verify_max_rel_err, with the worst matrix's name and every matrix's errors. `dtype` is what the device computes in; `joined` the number of matrices that
    its decode step multiplies together with others."""
    errors = compare(cpu, device)
    worst = max(errors, key=lambda name: errors[name]["max"])
    tolerance = TOLERANCE[str(dtype).removeprefix("torch.")]
    details: dict[str, Any] = {
        "definition": "|device - CPU| / rms of the CPU's output row, largest over all outputs of all matrices; same random rows on both sides, all compared",
        "rows": list(ROWS),
        "joined": joined,
        "input": "normal, rounded to bfloat16, seeded by the matrix's name",
        "worst": worst,
        "mean": sum(e["mean"] for e in errors.values()) / len(errors),
        "tolerance": tolerance,
        "above_tolerance": [name for name, e in errors.items() if e["max"] > tolerance],
        "matrices": errors,
    }
    known = METRICS["verify_max_rel_err"]
    return Measurement(value=errors[worst]["max"], unit=known.unit, protocol=known.protocol, details=details)
