"""Writes a GGUF or VQF file of a plain transformer as a Hugging Face folder: every weight decoded, in the narrowest float that holds it exactly.

Why: what other programs cannot read becomes what all of them read, and a quantised file can be compared with its original weight by weight. A tensor is
stored as bf16 where that is exact, else as float16, else as float32, so that no value changes. Memory holds about one shard and one matrix. The folder has
its name only when all of it is written and has been opened again.
What it does not prove: that the weights before quantisation were these.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from lab.artifacts.gguf_model import GgufArtifact
from lab.artifacts.hf import HfArtifact
from lab.artifacts.inspection import load_tokenizer
from lab.artifacts.publish import check_room
from lab.artifacts.vqf import vqf_path
from lab.artifacts.vqf_arch import fields_of_arch
from lab.artifacts.vqf_beside import check_tokenizer, config_beside
from lab.artifacts.vqf_convert import progress_bar
from lab.artifacts.vqf_file import Progress, VqfFile
from lab.artifacts.vqf_flags import FILE_NAMES
from lab.artifacts.vqf_weights import Q8_LAYOUTS, VqfWeights
from lab.artifacts.weights import Stored, Weights
from lab.console import console
from lab.convert.folder import INDEX, check_folder, new_folder
from lab.errors import LabError
from lab.models import inventory
from lab.models.transformer.config import TransformerConfig, from_dict

SHARD_BYTES = 1 << 30
"""A shard is closed when it holds this much."""
_LEAST_BYTES = 2  # of a stored weight


@dataclass
class Written:
    """What went into the folder: bytes of tensors, and by dtype how many weights."""

    nbytes: int = 0
    weights: dict[str, int] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The target's own options."""
    parser.add_argument("--q8-layout", choices=Q8_LAYOUTS)
    parser.add_argument("--force", action="store_true")


def run(source: Path, target: Path, arguments: argparse.Namespace) -> int:
    """Writes the folder `target` and prints what is in it. Raises LabError."""
    with progress_bar() as progress:
        done = convert(source, target, arguments.force, arguments.q8_layout, progress=progress)
    shares = ", ".join(f"{count} as {name}" for name, count in sorted(done.weights.items()))
    console().print(f"{target}  {done.nbytes} bytes of weights: {shares}; each exactly as decoded", soft_wrap=True, markup=False)
    return 0


def convert(
    source: Path, target: Path, force: bool = False, q8_layout: str | None = None, shard_bytes: int = SHARD_BYTES, progress: Progress | None = None
) -> Written:
    """Writes the model in the file `source` as the folder `target`. `q8_layout`: as in VqfWeights. Raises LabError; then nothing is left of `target`."""
    check_folder(target, force)
    fields, weights, tokenizer, check = _opened(source, q8_layout)
    config = from_dict(fields, str(source))
    if config.rope.factors is not None:
        raise LabError(f"{source}: its RoPE frequencies are divided one by one (rope_freqs), which a config.json cannot say; --to safetensors would lose it")
    count = _weights_of(config)
    check_room(target, _LEAST_BYTES * count)
    tell = progress or (lambda done, total, what: None)
    tell(0, 0, f"checking {source.name}")
    check(tell)
    done = Written()
    with new_folder(target, force) as folder:
        shards = _Shards(folder, shard_bytes)
        for name, tensor in tensors(config, weights):
            exact = narrowest(tensor)
            shards.add(name, exact)
            kind = str(exact.dtype).removeprefix("torch.")
            done.nbytes, done.weights[kind] = done.nbytes + exact.nbytes, done.weights.get(kind, 0) + exact.numel()
            tell(_LEAST_BYTES * sum(done.weights.values()), _LEAST_BYTES * count, name)
        shards.finish()
        (folder / "config.json").write_text(json.dumps({**fields, "dtype": "float32"}, indent=2) + "\n", encoding="utf-8")
        tokenizer.save(str(folder / "tokenizer.json"))
        tell(0, 0, f"reading {target.name} again")
        HfArtifact(folder, "qwen3").inspect()  # one reader for all plain transformers; model_type decides
        tell(_LEAST_BYTES * count, _LEAST_BYTES * count, "written")
    return done


def _weights_of(config: TransformerConfig) -> int:
    """How many weights `tensors` gives."""
    wanted = inventory(config)
    shapes = {**wanted.embeddings, **{name: shape for name, (shape, _) in wanted.linears.items()}, **wanted.vectors}
    return sum(map(prod, shapes.values())) + sum(3 * prod(stack) for stack in wanted.expert_stacks.values())


def tensors(config: TransformerConfig, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """(name in a released checkpoint, float32) of everything the model asks for; experts one matrix each, as they are released."""
    wanted = inventory(config)
    for name in dict.fromkeys((*wanted.embeddings, *wanted.linears)):  # the embedding is asked for twice where the head is tied to it
        yield _public(name), _dense(weights, name)
    for name in wanted.vectors:
        yield _public(name), weights.vector(name).to(torch.float32)
    for prefix, (count, width, _) in wanted.expert_stacks.items():
        tall, (down,) = weights.experts(prefix, count)
        for expert in range(count):
            both = torch.cat([_one(stack, expert) for stack in tall])
            for kind, matrix in (("gate", both[:width]), ("up", both[width:]), ("down", _one(down, expert))):
                yield _public(f"{prefix}.{expert}.{kind}_proj.weight"), matrix


def narrowest(tensor: Tensor) -> Tensor:
    """The float32 tensor as bf16 or float16 where that changes no value, else as it is."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal((narrow := tensor.to(dtype)).to(torch.float32), tensor):
            return narrow.contiguous()
    return tensor.contiguous()


def _opened(source: Path, q8_layout: str | None) -> tuple[dict[str, Any], Weights, Tokenizer, Callable[[Progress], object]]:
    """(fields of a config.json, weights, tokenizer, what checks the whole file). A VQF file may be laid out for any engine: it is decoded, not run."""
    if source.suffix == ".gguf":
        if q8_layout is not None:
            raise LabError("--q8-layout: only for a VQF source whose flag bit 0 is clear")
        artifact = GgufArtifact(source)
        if not isinstance(artifact.config(), TransformerConfig):
            raise LabError(f"{source}: {artifact.architecture} cannot be written as safetensors; only plain transformers (llama, qwen3, qwen3moe)")
        return dict(artifact.layout.config()), artifact.weights(), artifact.tokenizer(), lambda _: artifact.inspect()
    if source.suffix != ".vqf" and not any((source / name).is_file() for name in FILE_NAMES):
        raise LabError(f"{source}: neither a .gguf nor a .vqf file, which --to safetensors reads")
    file = VqfFile(vqf_path(source))
    arch, place = file.header.arch, file.path.with_name("tokenizer.json")
    weights = VqfWeights(file, q8_layout=q8_layout)
    weights.codec()  # ambiguous ones are refused before all else
    fields, tokenizer = fields_of_arch(file.path, arch, config_beside(file.path)), load_tokenizer(place.parent)
    check_tokenizer(tokenizer, place, arch.vocab_size, arch.eos_id)
    return fields, weights, tokenizer, weights.check


def _public(name: str) -> str:
    return name if name.startswith("lm_head") else f"model.{name}"


def _dense(weights: Weights, name: str) -> Tensor:
    """A matrix as float32, its row blocks joined and its columns in the model's order."""
    rows = torch.cat([block.codec.decode(block.parts, block.shape[-1]) for block in weights.matrix(name)])
    order = weights.column_order(name)
    return rows if order is None else torch.empty_like(rows).index_copy_(1, order, rows)


def _one(stack: Stored, expert: int) -> Tensor:
    return stack.codec.decode(stack.codec.select(stack.parts, expert), stack.shape[-1])


class _Shards:
    """Collects tensors and writes a shard when it is large enough; names and index follow when their number is known."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder, self.most_bytes = folder, most_bytes
        self.held: dict[str, Tensor] = {}
        self.closed: list[list[str]] = []
        self.total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        self.held[name] = tensor
        self.total += tensor.nbytes
        if sum(each.nbytes for each in self.held.values()) >= self.most_bytes:
            self._close()

    def finish(self) -> None:
        """Writes what is left, and gives the shards their names."""
        if self.held:
            self._close()
        count = len(self.closed)
        names = ["model.safetensors"] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        for number, name in enumerate(names):
            os.rename(self._file(number), self.folder / name)
        if count > 1:
            places = {tensor: name for name, held in zip(names, self.closed, strict=True) for tensor in held}
            index = {"metadata": {"total_size": self.total}, "weight_map": places}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _close(self) -> None:
        save_file(self.held, self._file(len(self.closed)), metadata={"format": "pt"})
        self.closed.append(list(self.held))
        self.held = {}

    def _file(self, number: int) -> Path:
        return self.folder / f"shard-{number}"
