"""`python -m lab convert SRC DST --to vqf`: from safetensors or GGUF by encoding, from VQF by laying out anew.

Why two ways: a VQF file whose layout was refused already holds the right codes in the wrong places, so without --wmode blocks only move and nothing is lost.
With --wmode everything is decoded and encoded again, and the summary says what that cost.
What it does not prove: that Kestrel loads the result; see `lab.artifacts.vqf_writer`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from lab.artifacts.hf import HfArtifact
from lab.artifacts.inspection import load_tokenizer
from lab.artifacts.vqf import vqf_path
from lab.artifacts.vqf_arch import fields_of_arch
from lab.artifacts.vqf_beside import config_beside
from lab.artifacts.vqf_file import Progress, VqfFile
from lab.artifacts.vqf_flags import FILE_NAMES, LAYOUT, names, parse_layout
from lab.artifacts.vqf_plan import WMODES
from lab.artifacts.vqf_relayout import Relaid, relayout
from lab.artifacts.vqf_weights import Q8_LAYOUTS, VqfWeights
from lab.artifacts.vqf_writer import Written, write_vqf
from lab.console import console
from lab.errors import LabError
from lab.models.fields import config_json
from lab.models.transformer.config import TransformerConfig, from_dict

_DEFAULT_LAYOUT = 0x3  # what Kestrel's engine expects as it is configured by default


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The target's own options."""
    parser.add_argument("--wmode", choices=list(WMODES))
    parser.add_argument("--layout", metavar="WORD")
    parser.add_argument("--q8-layout", choices=Q8_LAYOUTS)
    parser.add_argument("--force", action="store_true")


def run(source: Path, target: Path, arguments: argparse.Namespace) -> int:
    """Writes `target` (a .vqf file, or a folder that gets model.vqf) and prints what it is. Raises LabError."""
    path = target if target.suffix == ".vqf" else target / FILE_NAMES[0]
    layout = None if arguments.layout is None else parse_layout(arguments.layout)
    if path.exists() and not arguments.force:
        raise LabError(f"{path} exists; choose another name or say --force")
    with _bar() as progress:
        if _is_vqf(source):
            file = VqfFile(vqf_path(source))
            if arguments.wmode is None:
                word = _DEFAULT_LAYOUT if layout is None else layout
                done: Relaid | Written = relayout(file, path, word, arguments.q8_layout, progress, arguments.force)
            else:
                done = _encoded_again(file, path, arguments.wmode, layout, arguments.q8_layout, progress, arguments.force)
        else:
            if arguments.q8_layout is not None:
                raise LabError("--q8-layout: only for a VQF source whose flag bit 0 is clear")
            done = _encoded(source, path, arguments.wmode or "dual", layout, progress, arguments.force)
    _print(done)
    return 0


def _is_vqf(source: Path) -> bool:
    return source.suffix == ".vqf" or (source.is_dir() and any((source / name).is_file() for name in FILE_NAMES))


def _encoded_again(file: VqfFile, path: Path, wmode: str, layout: int | None, q8_layout: str | None, progress: Progress, force: bool) -> Written:
    """From the best set of matrices that a VQF file has. The vision tower is left out, since only text is decoded."""
    arch = file.header.arch
    if arch.has_vision:
        raise LabError(f"{file.path}: --wmode would lose its vision tower; convert the original model with Kestrel's converter, or leave --wmode out")
    file.check_sum(progress)
    weights = VqfWeights(file, q8_layout=q8_layout)
    weights.check_blocks()
    config = from_dict(fields_of_arch(file.path, arch, config_beside(file.path)), str(file.path))
    return write_vqf(weights, config, load_tokenizer(file.path.parent), path, wmode, layout, progress, arch.bos_id, force)


def _encoded(source: Path, path: Path, wmode: str, layout: int | None, progress: Progress, force: bool) -> Written:
    artifact: Any
    bos: object = 0
    if source.suffix == ".gguf":
        from lab.artifacts.gguf_model import GgufArtifact

        artifact = GgufArtifact(source)
        bos = artifact.gguf.metadata.get("tokenizer.ggml.bos_token_id", 0)
    else:
        data = config_json(source / "config.json")
        artifact = HfArtifact(source, "qwen3")  # one reader for all plain transformers; model_type decides
        bos = {**data, **(data.get("text_config") or {})}.get("bos_token_id")
    config = artifact.config()
    if not isinstance(config, TransformerConfig):
        raise LabError(f"{source}: not of the qwen3 family, which is all that a VQF file holds")
    artifact.inspect()
    return write_vqf(artifact.weights(), config, artifact.tokenizer(), path, wmode, layout, progress, bos if isinstance(bos, int) else 0, force)


@contextmanager
def _bar() -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console(sys.stderr)) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def _print(done: Relaid | Written) -> None:
    out = partial(console().print, soft_wrap=True, markup=False)
    if isinstance(done, Relaid):
        moved = f"{len(done.moved)} tensors laid out anew ({', '.join(done.moved)})" if done.moved else "no tensor had to move"
        out(f"{done.path}  {done.nbytes} bytes  layout {done.from_layout:#x} -> {done.to_layout:#x} ({names(done.to_layout)})")
        out(f"{moved}; lossless: what moved was put back and compared, the rest was copied")
        if done.dropped:
            out(f"left out: {', '.join(done.dropped)}")
        return
    title = f"{done.path}  {done.nbytes} bytes  flags {done.flags:#x}, layout {done.flags & LAYOUT:#x} ({names(done.flags & LAYOUT)})"
    table = Table(title=escape(title), box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("type", "tensors", "weights", "bytes", "bpw", "least cosine", "lossless"):
        table.add_column(heading, justify="left" if heading == "type" else "right")
    for name, each in sorted(done.sums.items(), key=lambda item: -item[1].nbytes):
        bits, lossless = f"{8 * each.nbytes / each.weights:.3f}", "yes" if each.lossless else "no"
        table.add_row(name, str(len(each.tensors)), str(each.weights), str(each.nbytes), bits, f"{each.cosine:.6f}", lossless)
    console().print(table)
    if any(name in ("vqf:Q8_0", "vqf:G256") for name in done.sums):
        out("flag bit 0 is clear, which means plain rows or 4x4 tiles: a reader must be told that these are rows")
    out("vocab.bin, which Kestrel's engine wants beside the file, is not written; take it from Kestrel's converter")
