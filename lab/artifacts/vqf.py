"""A VQF model as an artifact: found, gated, checked, and handed out as config, weights and tokenizer.

Why the gate stands first: layout bits that differ from the engine's configuration end here, in an error that says which bits and how to convert, and no option
relaxes that. A VQF file holds no tokenizer. Kestrel keeps `vocab.bin` and `config.json` beside it; the lab reads `tokenizer.json` of the same folder instead,
because what vocab.bin looks like is not public in the material at hand. Facts: notes on VQF, sections 1.1 and 1.6.
What it does not prove: that the tokenizer beside the file is the model's; only its size and the end token are compared.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lab.artifacts.inspection import digests, load_tokenizer
from lab.artifacts.vqf_arch import fields_of_arch
from lab.artifacts.vqf_beside import check_tokenizer, config_beside
from lab.artifacts.vqf_file import Progress, VqfFile
from lab.artifacts.vqf_flags import FILE_NAMES, X8, Engine, check_layout, names
from lab.artifacts.vqf_relayout import way_out
from lab.artifacts.vqf_weights import VqfWeights
from lab.errors import LabError
from lab.models import ModelConfig, inventory, read_config


class VqfArtifact:
    """`lab.artifacts.weights.Artifact` over a VQF file. `engine` is the configuration that the file must have been laid out for."""

    format = "vqf"

    def __init__(self, path: Path, engine: Engine | None = None, use: str | None = None, q8_layout: str | None = None) -> None:
        """`path`: the file, or a folder with one. `use`, `q8_layout`: as in VqfWeights. Raises LayoutRefusedError (a LabError) at the gate, else LabError."""
        self.path = vqf_path(path)
        self.engine = engine or Engine()
        self.file = VqfFile(self.path)
        self.arch = "qwen3_moe" if self.file.header.arch.n_experts else "qwen3"
        check_layout(self.path, self.file.header.flags, self.engine, partial(way_out, self.file))
        self._weights = VqfWeights(self.file, use, q8_layout)

    def config(self) -> ModelConfig:
        """The sizes, from the header; of a mixture also `norm_topk_prob`, from the config.json beside the file."""
        return read_config(self.arch, self.config_fields(), str(self.path))

    def config_fields(self) -> dict[str, Any]:
        """The same as a config.json's fields."""
        return fields_of_arch(self.path, self.file.header.arch, config_beside(self.path))

    def weights(self) -> VqfWeights:
        """The tensors. Matrices are refused where their layout is not known."""
        return self._weights

    def tokenizer(self) -> Tokenizer:
        """The tokenizer.json of the file's folder."""
        if not (self.path.parent / "tokenizer.json").is_file():
            has = "; vocab.bin is there, but is not read" if (self.path.parent / "vocab.bin").is_file() else ""
            raise LabError(f"{self.path}: no tokenizer.json beside it{has}; put the original model's tokenizer.json into {self.path.parent}")
        return load_tokenizer(self.path.parent)

    def inspect(self, progress: Progress | None = None) -> dict[str, Any]:
        """{format, layout, sha256, files, bytes, layers, vocab_size, tensors, version, flags, ..., notes}: reads every byte for checksum and digest. Raises
        LabError."""
        file, weights, header = self.file, self._weights, self.file.header
        config, codec = self.config(), weights.codec()
        _check_shapes(weights, config)
        weights.check_blocks()
        check_tokenizer(self.tokenizer(), self.path.with_name("tokenizer.json"), config.vocab_size, config.eos_token_id)
        summed = file.check_sum(progress)
        files = [self.path, *(p for p in (self.path.with_name(n) for n in ("config.json", "tokenizer.json")) if p.is_file())]
        return {
            "format": self.format,
            "layout": f"VQF {header.version}, flags {header.flags:#x}, {weights.used} as {codec.name}",
            **digests(files),
            "bytes": sum(each.stat().st_size for each in files),
            "layers": config.num_layers,
            "vocab_size": config.vocab_size,
            "tensors": len(file.entries),
            "version": header.version,
            "flags": header.flags,
            "flag_names": names(header.flags),
            "header": "legacy, 432 bytes" if header.legacy else "448 bytes",
            "sets": list(file.sets),
            "codecs": {"embed": weights.matrix("embed_tokens.weight")[0].codec.name, "trunk": codec.name, "head": codec.name, "small": "vqf:F32"},
            "ambiguous": weights.ambiguous,
            "block_shares": weights.block_shares(),
            "checksum": "right" if summed else "none in the file",
            "unknown": list(file.unknown),
            "notes": self._notes(summed),
        }

    def _notes(self, summed: bool) -> list[str]:
        found = []
        if self._weights.ambiguous:
            found.append("flag bit 0 is clear: rows and 4x4 tiles look the same to it, and the layout was given by hand")
        if len(self.file.sets) == 2:
            found.append(f"the file holds q8 and q4 matrices; {self._weights.used} is read")
        if not summed:
            found.append("the writer stored no checksum, so damage in the data cannot be seen")
        if self.file.header.arch.has_vision:
            found.append("the vision tower is not read")
        if self.file.header.flags & X8:
            found.append("x8 copies are not read: their converter fills them wrongly")
        return found


def vqf_path(path: Path) -> Path:
    """The file that `path` means: itself, or a folder's first of `FILE_NAMES`. Raises LabError where there is none."""
    if not path.is_dir():
        return path
    for name in FILE_NAMES:
        if (path / name).is_file():
            return path / name
    raise LabError(f"{path}: no VQF file; looked for {', '.join(FILE_NAMES)}")


def _check_shapes(weights: VqfWeights, config: ModelConfig) -> None:
    """Raises LabError where something that the model asks for is not in the file in the shape it needs."""
    wanted = inventory(config)
    matrices = {**{name: shape for name, (shape, _) in wanted.linears.items()}, **wanted.embeddings}
    found = {name: tuple(weights.matrix(name)[0].shape) for name in matrices}
    found |= {name: tuple(weights.vector(name).shape) for name in wanted.vectors}
    for name, shape in {**matrices, **wanted.vectors}.items():
        if found[name] != shape:
            raise LabError(f"{weights.where}: {name} has shape {list(found[name])}, the model needs {list(shape)}")
    for prefix, (count, _, _) in wanted.expert_stacks.items():
        weights.experts(prefix, count)
