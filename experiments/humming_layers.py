"""humming-kernels' matrices and expert stacks as `experiments.humming_bench` compares them: random weights, its own launch shapes, its indexed layout.

Why apart: this is the other library's side, after its interface of version 0.1.20 (HummingLayer, quant_tensor, get_heuristics_config), imported where used.
What it does not prove: that another way of calling it is not faster; the launch shapes are its own heuristics for the number of rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

SAMPLE = 6
"""Experts of a stack whose weights are kept for checking."""


def aligned(ids: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids [T, k] -> what humming's indexed product takes: (slot numbers by expert, each expert's filled up to `block` with the number of slots; the expert of
    each block; how many slot numbers there are), int32."""
    flat = ids.flatten().long()
    counts = flat.bincount(minlength=experts)
    blocks = (counts + block - 1) // block
    order = flat.argsort(stable=True)
    rank = torch.arange(len(flat), device=ids.device) - (counts.cumsum(0) - counts)[flat[order]]
    place = ((blocks.cumsum(0) - blocks) * block)[flat[order]] + rank
    slots = torch.full((int(blocks.sum()) * block,), len(flat), dtype=torch.int32, device=ids.device)
    slots[place] = order.to(torch.int32)
    owner = torch.arange(experts, dtype=torch.int32, device=ids.device).repeat_interleave(blocks)
    return slots, owner, torch.tensor(len(slots), dtype=torch.int32, device=ids.device)


class Humming:
    """One matrix or stack of humming's: random weights quantised by itself; `truth` decodes some of them."""

    def __init__(self, kind: str, group: int, rows: int, cols: int, experts: int | None = None) -> None:
        made = import_module("humming.layer")
        schema = import_module("humming.schema").HummingWeightSchema
        with torch.device("cuda"):
            config = {"dtype": kind, "group_size": group}
            self.layer = made.HummingLayer(rows, cols, config, num_experts=experts, torch_dtype=torch.bfloat16)
            shape = (rows, cols) if experts is None else (experts, rows, cols)
            weight = torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02)
        tensors = schema.quant_tensor(weight, self.layer.weight_schema, torch.bfloat16)
        self.kept = {name: (part if experts is None else part[:SAMPLE].clone()) for name, part in tensors.items()}
        self.schema = self.layer.weight_schema
        self.layer.load_from_tensors(tensors)
        self.layer.transform()
        self.experts = experts
        self.nbytes = sum(parameter.nbytes for parameter in self.layer.parameters()) // (experts or 1)

    def truth(self) -> Tensor:
        """float32: the matrix, or the first SAMPLE of the stack."""
        return self.schema.dequant_tensors(self.kept).float()

    def shape(self, rows: int) -> dict[str, Any]:
        """humming's own choice of a launch shape for `rows` rows of output."""
        kind = "dense" if self.experts is None else "indexed"
        found = import_module("humming.tune").get_heuristics_config(self.layer.humming_config, shape_m=rows, gemm_type=kind)
        return dict(found)

    def compile(self, rows: int) -> None:
        """Makes the kernel for `rows` rows."""
        compute = {} if self.experts is None else {"gemm_type": "indexed"}
        kernel = import_module("humming.kernel.humming").HummingKernel
        kernel.prepare_kernels(self.layer.humming_config.to_str(), json.dumps(compute), json.dumps(self.shape(rows)), torch.cuda.current_device())

    def dense(self, x: Tensor) -> Callable[[], Any]:
        """x [M, cols] -> a call giving [M, rows]."""
        return partial(self.layer, x, compute_config={}, tuning_config=self.shape(len(x)))

    def indexed(self, ids: Tensor) -> Callable[[Tensor], Any]:
        """ids [T, k] -> a call that takes x [T, cols] and gives [T k, rows], a row per slot."""
        assert self.experts is not None
        tuning = self.shape(ids.numel())
        slots, owner, count = aligned(ids, self.experts, tuning["block_shape"][0])
        options = {"sorted_ids": slots, "expert_ids": owner, "num_tokens_padded": count, "top_k": ids.shape[1]}
        return partial(self.layer, compute_config={"gemm_type": "indexed"}, tuning_config=tuning, **options)
