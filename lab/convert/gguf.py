"""Writes a Hugging Face checkpoint as one GGUF file, tensor by tensor, and looks at each again after encoding it.

Why the check is part of writing: an encoder or an order that is wrong gives a file that loads and talks nonsense, and it is found cheapest while both sides
are at hand. Every piece is decoded and compared (`verify_encoding`), and the whole file is opened again before it gets its name.
What it does not prove: that llama.cpp computes with it what the lab does; `experiments/gguf_llama_check.py` compares the two.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from rich import box
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from lab.artifacts.gguf import open_gguf
from lab.artifacts.gguf_writer import MetaValue, Planned, TensorSink, writing
from lab.artifacts.hf import HfArtifact
from lab.artifacts.publish import check_target
from lab.codecs import create, verify_encoding
from lab.codecs.gguf import PART
from lab.codecs.gguf_types import TYPES, GgufType
from lab.console import console
from lab.convert.gguf_keys import keys
from lab.convert.gguf_plan import TypePlan, find_plan, read_plan
from lab.convert.gguf_tensors import Outgoing, outgoing
from lab.convert.gguf_vocabulary import vocabulary
from lab.errors import LabError, flat
from lab.models.fields import config_json
from lab.models.qwen4_exp.config import MODEL_TYPES, Qwen4ExpConfig
from lab.project import find_project, say

_FILE_TYPES = {
    **{"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12, "Q4_K": 15, "Q5_K": 17, "Q6_K": 18},
    **{"IQ2_XXS": 19, "IQ2_XS": 20, "IQ3_XXS": 23, "IQ1_S": 24, "IQ4_NL": 25, "IQ3_S": 26, "IQ2_S": 28, "IQ4_XS": 30, "IQ1_M": 31, "BF16": 32},
    **{"MXFP4": 38, "NVFP4": 39, "Q1_0": 40, "Q2_0": 41},
}
"""general.file_type by the type that most weights have (llama.cpp's enum llama_ftype). It describes; readers go by each tensor's own type."""
_QUANTIZATION_VERSION = 2  # GGML_QNT_VERSION of ggml.h
_TEXT_MOST = 1 << 22  # characters of a chat template


@dataclass
class _Sum:
    """What was written in one type."""

    tensors: int = 0
    weights: int = 0
    nbytes: int = 0
    cosines: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The target's own options."""
    parser.add_argument("--types", required=True, metavar="PLAN")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--force", action="store_true")


def run(source: Path, target: Path, arguments: argparse.Namespace) -> int:
    """Writes `target`. Raises LabError."""
    if source.suffix == ".gguf":
        raise LabError(f"{source}: GGUF to GGUF is not supported (encoding twice loses twice); convert from the safetensors folder")
    plan_path = find_plan(arguments.types, find_project().conf / "gguf_plans")
    sums = convert(source, target, plan_path, arguments.force, arguments.device)
    _print_summary(target, sums)
    return 0


def convert(source: Path, target: Path, plan_path: Path, force: bool = False, device: str = "cpu") -> dict[str, _Sum]:
    """Writes the checkpoint folder `source` to `target` by the plan, encoding on `device`; returns what was written, by type. Raises LabError in one line."""
    plan, place = read_plan(plan_path), _device(device)
    data = config_json(source / "config.json") if source.is_dir() else {}
    if source.is_dir() and data.get("model_type") not in MODEL_TYPES:
        raise LabError(f"{source / 'config.json'}: model_type {data.get('model_type')!r}; only qwen4_exp can be written as GGUF yet")
    check_target(target, force)
    artifact = HfArtifact(source, "qwen4_exp")
    config = artifact.config()
    assert isinstance(config, Qwen4ExpConfig)
    say(f"checking {source}")
    facts, weights = artifact.inspect(), artifact.weights()
    tensors = outgoing(config, weights)
    planned = [Planned(each.name, each.shape, _type(plan, each)) for each in tensors]
    for idle in plan.idle((each.name, each.layer) for each in tensors if not each.vector):
        say(f"note: {plan_path}: rules[{idle}] decides about no tensor of this model")
    text = {**data, **data.get("text_config", {})}
    bos = text.get("bos_token_id")
    metadata: dict[str, MetaValue] = {
        "general.architecture": "qwen4exp",
        "general.type": "model",
        "general.name": source.resolve().name,
        "general.file_type": np.uint32(_FILE_TYPES.get(_main_type(planned), 0)),
        "general.quantization_version": np.uint32(_QUANTIZATION_VERSION),
        "lab.source.sha256": facts["sha256"],
        "lab.types.plan": plan.name,
        "lab.types.sha256": hashlib.sha256(plan_path.read_bytes()).hexdigest(),
        **keys(config, text, weights, str(source / "config.json")),
        **vocabulary(source / "tokenizer.json", config.vocab_size, config.eos_token_id, bos if isinstance(bos, int) else None),
        **_template(source),
    }
    if "lab.tokenizer.normalizer" in metadata:
        say(f"note: the tokenizer's {metadata['lab.tokenizer.normalizer']} is no part of GGUF; text that is not so composed gets other ids from this file")
    with writing(target, metadata, planned, lambda path: _reread(path, planned), force) as sink:
        return _stream(sink, tensors, planned, place)


def _device(word: str) -> torch.device:
    try:
        return torch.empty(0, device=word).device
    except (RuntimeError, AssertionError) as error:  # torch says "not compiled with CUDA" by an assertion
        raise LabError(f"--device {word}: not usable here ({flat(error, 120)})") from None


def _type(plan: TypePlan, tensor: Outgoing) -> GgufType:
    return TYPES["F32"] if tensor.vector else plan.choose(tensor.name, tensor.layer, tensor.shape[-1])


def _main_type(planned: Sequence[Planned]) -> str:
    weights: dict[str, int] = {}
    for each in planned:
        weights[each.type.name] = weights.get(each.type.name, 0) + prod(each.shape)
    return max(weights, key=lambda name: weights[name])


def _template(source: Path) -> dict[str, MetaValue]:
    """The chat template that lies beside the checkpoint, if there is one."""
    path = source / "chat_template.jinja"
    if not path.is_file() or path.stat().st_size > _TEXT_MOST:
        return {}
    return {"tokenizer.chat_template": path.read_text(encoding="utf-8", errors="replace")}


def _stream(sink: TensorSink, tensors: Sequence[Outgoing], planned: Sequence[Planned], device: torch.device) -> dict[str, _Sum]:
    """Encodes, checks and writes every tensor. Raises LabError naming the tensor that does not come out as it went in."""
    sums: dict[str, _Sum] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(sys.stderr)) as bar:
        task = bar.add_task("writing", total=sum(each.nbytes for each in planned))
        for tensor, plan in zip(tensors, planned, strict=True):
            bar.update(task, description=f"{tensor.name} {plan.type.name}")
            codec = create(f"gguf:{plan.type.name}")
            similar = rows = 0.0
            for rows_on_host in tensor.rows():
                piece = rows_on_host.to(device)
                try:
                    parts = codec.encode(piece)
                except LabError as error:
                    raise LabError(f"tensor {tensor.name}: {error}") from None
                check = verify_encoding(codec, parts, piece, sample_rows=len(piece))
                check.require(f"tensor {tensor.name}")
                similar, rows = similar + check.cosine * len(piece), rows + len(piece)
                sink.write(tensor.name, parts[PART].cpu().numpy())
                bar.advance(task, parts[PART].numel())
            found = sums.setdefault(plan.type.name, _Sum())
            found.tensors, found.weights, found.nbytes = found.tensors + 1, found.weights + prod(tensor.shape), found.nbytes + plan.nbytes
            found.cosines += similar / rows
    return sums


def _reread(path: Path, planned: Sequence[Planned]) -> None:
    """Opens the written file as any reader does. Raises LabError where it is not what was planned."""
    found = {name: (tensor.shape, tensor.type.name) for name, tensor in open_gguf(path).tensors.items()}
    if found != {each.name: (each.shape, each.type.name) for each in planned}:
        raise LabError(f"{path}: what was written is not what can be read; nothing was kept")


def _print_summary(target: Path, sums: dict[str, _Sum]) -> None:
    table = Table(title=f"{target.name}  {target.stat().st_size} bytes", box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("type", "tensors", "weights", "bytes", "bpw", "mean cosine"):
        table.add_column(heading, justify="left" if heading == "type" else "right")
    for name, each in sorted(sums.items(), key=lambda item: -item[1].nbytes):
        bits = 8 * each.nbytes / each.weights
        table.add_row(name, str(each.tensors), str(each.weights), str(each.nbytes), f"{bits:.3f}", f"{each.cosines / each.tensors:.6f}")
    nbytes, weights = sum(each.nbytes for each in sums.values()), sum(each.weights for each in sums.values())
    table.add_row("all", str(sum(each.tensors for each in sums.values())), str(weights), str(nbytes), f"{8 * nbytes / weights:.3f}", "")
    console().print(table)
