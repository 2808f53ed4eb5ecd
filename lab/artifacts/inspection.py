"""Checks an artifact folder before anything is loaded and says what it is.

Every tensor the model will ask for must be in the files with the right shape, the hash constants must equal the derived ones, and the tokenizer must
fit the embedding. The digest covers weights, config and tokenizer, and joins the resume key. Contents of tensors are not looked at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lab.artifacts.checkpoint import Checkpoint
from lab.errors import LabError
from lab.models import ModelConfig, inventory

_FLOATS = ("BF16", "F16", "F32")


def inspect_folder(folder: Path, config: ModelConfig) -> dict[str, Any]:
    """{format, layout, sha256, files, bytes, layers, vocab_size, tensors} of a checkpoint folder with these sizes. Raises LabError in one line."""
    checkpoint = Checkpoint(folder)
    layout = _check_tensors(checkpoint, config)
    _check_tokenizer(folder, config)
    files = [folder / "config.json", folder / "tokenizer.json", *checkpoint.files]
    return {
        "format": "safetensors",
        "layout": layout,
        **digests(files),
        "bytes": sum(f.stat().st_size for f in files),
        "layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "tensors": sum(1 for _ in checkpoint.names()),
    }


def digests(files: Sequence[Path]) -> dict[str, Any]:
    """{sha256 of all, files: {name: sha256}}: the same for the same contents under the same names, wherever they lie."""
    each = {f.name: _sha256(f) for f in files}
    whole = hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in sorted(each.items())).encode()).hexdigest()
    return {"sha256": whole, "files": each}


def load_tokenizer(folder: Path) -> Tokenizer:
    """The artifact's tokenizer. Raises LabError when it is missing or cannot be parsed."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise LabError(f"{path}: no such file; the artifact folder needs its tokenizer")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for anything it cannot parse
        raise LabError(f"{path}: not a tokenizer ({error})") from None


def _check_tokenizer(folder: Path, config: ModelConfig) -> None:
    tokenizer = load_tokenizer(folder)
    highest = max(tokenizer.get_vocab().values())
    if highest >= config.vocab_size:
        raise LabError(f"{folder / 'tokenizer.json'}: token id {highest} does not fit the model's vocabulary of {config.vocab_size} rows")
    if tokenizer.id_to_token(config.eos_token_id) is None:
        raise LabError(f"{folder / 'tokenizer.json'}: the config's eos_token_id {config.eos_token_id} is no token of this tokenizer")


def _check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> str:
    """The expert layout. Raises LabError at the first tensor that is missing or has another shape."""
    wanted = inventory(config)
    shapes: dict[str, tuple[int, ...]] = {name: shape for name, (shape, _) in wanted.linears.items()}
    shapes |= wanted.vectors | wanted.embeddings | {name: (len(value),) for name, value in wanted.constants.items()}
    layouts = set()
    for prefix, (count, width, hidden) in wanted.expert_stacks.items():
        if checkpoint.is_fused(prefix):
            layouts.add("fused experts")
            shapes |= {f"{prefix}.gate_up_proj": (count, 2 * width, hidden), f"{prefix}.down_proj": (count, hidden, width)}
        else:
            layouts.add("per-expert")
            for e in range(count):
                shapes |= {f"{prefix}.{e}.{kind}_proj.weight": (width, hidden) for kind in ("gate", "up")}
                shapes[f"{prefix}.{e}.down_proj.weight"] = (hidden, width)
    for name, shape in shapes.items():
        if checkpoint.shape(name) != shape:
            raise LabError(f"{checkpoint.folder}: tensor {name} has shape {list(checkpoint.shape(name))}, config.json asks for {list(shape)}")
        _check_dtype(checkpoint, name, f"{name}_scale_inv", constant=name in wanted.constants)
    for prefix, (rows, width) in wanted.tables.items():
        parts, _ = checkpoint.table(prefix)
        for name in parts:
            _check_dtype(checkpoint, name, f"{prefix}.weight_scale")
        stored = [checkpoint.shape(name) for name in parts]
        if sum(s[0] for s in stored) != rows or any(s[1:] != (width,) for s in stored):
            raise LabError(f"{checkpoint.folder}: {prefix}: {sum(s[0] for s in stored)} rows in {len(parts)} parts, expected {rows} x {width}")
    for name, value in wanted.constants.items():
        if (found := checkpoint.get(name).tolist()) != value:
            raise LabError(f"{checkpoint.folder}: {name} is {found}, but seed and sizes give {value}; integers read through a float lose digits")
    return " and ".join(sorted(layouts)) or "dense"


def _check_dtype(checkpoint: Checkpoint, name: str, scale: str, constant: bool = False) -> None:
    """Raises LabError for a dtype the loader would refuse, or an 8-bit tensor whose scale is not in the files: read without it, it is fluent and wrong."""
    found = checkpoint.dtype(name)
    if constant:
        if found != "I64":
            raise LabError(f"{checkpoint.folder}: {name} is stored as {found}; hash constants must be I64")
    elif found == "F8_E4M3":
        if scale not in checkpoint:
            raise LabError(f"{checkpoint.folder}: {name} is F8_E4M3 but its scale {scale} is missing")
    elif found not in _FLOATS:
        raise LabError(f"{checkpoint.folder}: {name} is stored as {found}; expected {', '.join(_FLOATS)}, or F8_E4M3 with its scale")


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def corpus_facts(path: Path) -> dict[str, Any]:
    """{path name, sha256, bytes} of a text file. Raises LabError when it is missing."""
    if not path.is_file():
        raise LabError(f"{path}: no such file (model.corpus)")
    return {"name": path.name, "sha256": _sha256(path), "bytes": path.stat().st_size}
