"""`python -m lab convert SRC DST --to vqf`: from safetensors or GGUF by encoding, from VQF by laying out anew.

Why two ways: a VQF file whose layout was refused already holds the right codes in the wrong places, so without --wmode blocks only move and no weight changes.
With --wmode everything is decoded and encoded again, and the summary says what that cost.
What it does not prove: that Kestrel loads the result; see `lab.artifacts.vqf_writer`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
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
from lab.artifacts.publish import check_target
from lab.artifacts.vqf import vqf_path
from lab.artifacts.vqf_arch import fields_of_arch
from lab.artifacts.vqf_beside import check_tokenizer, config_beside, parsed
from lab.artifacts.vqf_file import Progress, VqfFile
from lab.artifacts.vqf_flags import FILE_NAMES, G256, LAYOUT, Q4I, Q8_8X8, convert_command, names, parse_layout
from lab.artifacts.vqf_plan import WMODES
from lab.artifacts.vqf_relayout import Relaid, relayout
from lab.artifacts.vqf_weights import Q8_LAYOUTS, VqfWeights
from lab.artifacts.vqf_writer import Written, write_vqf
from lab.console import console
from lab.errors import LabError
from lab.models.transformer.config import TransformerConfig, from_dict

_DEFAULT_LAYOUT = 0x3  # what Kestrel's engine expects as it is configured by default
_DEFAULT_WMODE = "dual"  # as Kestrel's converter
_ABSENT = {"tokenizer.json": "the lab cannot run it", "config.json": "Kestrel wants it, and the lab of a mixture"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The target's own options."""
    parser.add_argument("--wmode", choices=list(WMODES))
    parser.add_argument("--layout", metavar="WORD")
    parser.add_argument("--q8-layout", choices=Q8_LAYOUTS)
    parser.add_argument("--force", action="store_true")


def run(source: Path, target: Path, arguments: argparse.Namespace) -> int:
    """Writes `target` (a .vqf file, or a folder that gets model.vqf) and prints what it is. Raises LabError."""
    path = target_file(target)
    layout = None if arguments.layout is None else parse_layout(arguments.layout)
    check_target(path, arguments.force)
    with progress_bar() as progress:
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
            done = _encoded(source, path, arguments.wmode or _DEFAULT_WMODE, layout, progress, arguments.force)
    _print(done)
    return 0


def target_file(target: Path) -> Path:
    """The file that `target` means: itself with the suffix .vqf, else model.vqf in a folder of that name. Raises LabError for the name of another format."""
    if target.suffix == ".vqf":
        return target
    if (target.suffix or target.name).lower() in (".vqf", ".gguf", ".safetensors"):
        raise LabError(f"{target}: name the file with .vqf in small letters, by which others know it, or name a folder")
    return target / FILE_NAMES[0]


def _is_vqf(source: Path) -> bool:
    return source.suffix == ".vqf" or (source.is_dir() and any((source / name).is_file() for name in FILE_NAMES))


def _encoded_again(file: VqfFile, path: Path, wmode: str, layout: int | None, q8_layout: str | None, progress: Progress, force: bool) -> Written:
    """From the best set of matrices that a VQF file has. The vision tower is left out, since only text is decoded."""
    arch, folder = file.header.arch, file.path.parent
    if arch.has_vision:
        raise LabError(f"{file.path}: --wmode would lose its vision tower; convert the original model with Kestrel's converter, or leave --wmode out")
    weights = VqfWeights(file, q8_layout=q8_layout)
    weights.codec()  # ambiguous ones are refused before all else
    fields = fields_of_arch(file.path, arch, config_beside(file.path))
    tokenizer = load_tokenizer(folder)
    check_tokenizer(tokenizer, folder / "tokenizer.json", arch.vocab_size, arch.eos_id)
    config = from_dict(fields, str(file.path))
    kept = None if _same_folder(folder, path) else tokenizer
    return write_vqf(weights, config, kept, path, wmode, layout, progress, force, fields, partial(weights.check, progress))


def _encoded(source: Path, path: Path, wmode: str, layout: int | None, progress: Progress, force: bool) -> Written:
    artifact: Any
    if source.suffix == ".gguf":
        from lab.artifacts.gguf_model import GgufArtifact

        artifact = GgufArtifact(source)
        fields = {**artifact.layout.config(), "bos_token_id": artifact.gguf.metadata.get("tokenizer.ggml.bos_token_id")}
    else:
        if source.exists() and not source.is_dir():
            raise LabError(f"{source}: neither a .vqf nor a .gguf file; of a safetensors model name the folder, with its config.json")
        fields = parsed(source / "config.json")
        artifact = HfArtifact(source, "qwen3")  # one reader for all plain transformers; model_type decides
    config = artifact.config()
    if not isinstance(config, TransformerConfig):
        raise LabError(f"{source}: not of the qwen3 family, which is all that a VQF file holds")
    kept = None if source.is_dir() and _same_folder(source, path) else artifact.tokenizer()
    progress(0, 0, f"reading {source.name}")
    return write_vqf(artifact.weights(), config, kept, path, wmode, layout, progress, force, fields, artifact.inspect)


def _same_folder(folder: Path, path: Path) -> bool:
    return folder.resolve() == path.parent.resolve()


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on standard error for whatever counts bytes; a total of 0 means that it is not known."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console(sys.stderr)) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total or None, description=escape(what))


def _print(done: Relaid | Written) -> None:
    out = partial(console().print, soft_wrap=True, markup=False)
    if isinstance(done, Relaid):
        _print_relaid(done, out)
    else:
        _print_written(done, out)
    out("vocab.bin, which Kestrel's engine wants beside the file, is not written; take it from Kestrel's converter")


def _print_relaid(done: Relaid, out: Callable[[str], None]) -> None:
    moved = f"{len(done.moved)} tensors laid out anew ({', '.join(done.moved)})" if done.moved else "no tensor had to move"
    out(f"{done.path}  {done.nbytes} bytes  layout {done.from_layout:#x} -> {done.to_layout:#x} ({names(done.to_layout)})")
    if done.dropped:
        out(f"{moved}; what moved was put back and compared, the rest was copied, but for what was left out: {', '.join(done.dropped)}")
    else:
        out(f"{moved}; lossless: what moved was put back and compared, the rest was copied")
    for bit, wmode in ((Q4I, "q4i"), (G256, "g256")):
        if done.from_layout & ~done.to_layout & bit:
            out(f"the file is no longer {wmode}: the same codes and scales are now marked as plain Q8_0; --layout with bit {bit:#x} keeps the mark")
    for name in done.absent:
        out(f"warning: no {name} beside either file: {_ABSENT[name]}; put the original model's into {done.path.parent}")


def _print_written(done: Written, out: Callable[[str], None]) -> None:
    out(f"{done.path}  {done.nbytes} bytes  flags {done.flags:#x}, layout {done.flags & LAYOUT:#x} ({names(done.flags & LAYOUT)})")
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("type", "tensors", "weights", "bytes", "bpw", "least cosine", "lossless"):
        table.add_column(heading, justify="left" if heading == "type" else "right")
    for name, each in sorted(done.sums.items(), key=lambda item: -item[1].nbytes):
        bits, lossless = f"{8 * each.nbytes / each.weights:.3f}", "yes" if each.lossless else "no"
        table.add_row(name, str(len(each.tensors)), str(each.weights), str(each.nbytes), bits, f"{each.cosine:.6f}", lossless)
    console().print(table)
    if any(name in ("vqf:Q8_0", "vqf:G256") for name in done.sums):
        out("flag bit 0 is clear, which means plain rows or 4x4 tiles: a reader must be told that these are rows")
    if done.flags & G256:
        out(f"the lab's engine runs with wmode dual and refuses g256; to run it here: {convert_command(done.path, _DEFAULT_LAYOUT, _rows(done.flags))}")


def _rows(flags: int) -> str:
    return "" if flags & Q8_8X8 else " --q8-layout rows"
