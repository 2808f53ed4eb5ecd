"""Files that hold weights: opening, reading, checking, identifying.

One door: what a path points at decides the format, and nothing behind it asks again.
"""

from __future__ import annotations

from pathlib import Path

from lab.artifacts.checkpoint import Checkpoint
from lab.artifacts.hf import HfArtifact, HfWeights
from lab.artifacts.inspection import corpus_facts, load_tokenizer
from lab.artifacts.synthetic import SyntheticArtifact
from lab.artifacts.vqf_flags import FILE_NAMES
from lab.artifacts.weights import Artifact, Stored, Weights
from lab.cell import SYNTHETIC, ModelSpec
from lab.errors import LabError

__all__ = [
    "Artifact",
    "Checkpoint",
    "HfArtifact",
    "HfWeights",
    "Stored",
    "SyntheticArtifact",
    "Weights",
    "corpus_facts",
    "load_tokenizer",
    "open_artifact",
    "open_model",
]


TEXT_TOKENIZER = Path("experiments/nano")
"""Whose tokenizer reads texts for synthetic weights, which have none: it ships with the project, and its ids fit every vocabulary."""


def open_model(root: Path, model: ModelSpec, files: str | None = None) -> Artifact | SyntheticArtifact:
    """The files of a cell's model below the project's `root`, or `files` instead of them. Raises LabError."""
    files = model.artifact if files is None else files
    if files == SYNTHETIC:
        return SyntheticArtifact(root / model.geometry, model.arch, root / TEXT_TOKENIZER, model.table_rows)
    return open_artifact(root / files, model.arch)


def open_artifact(path: Path, arch: str) -> Artifact:
    """The model at `path`, a folder or a file, of the architecture `arch`. Raises LabError where it is neither or holds another architecture."""
    if path.suffix == ".gguf":
        from lab.artifacts.gguf_model import GgufArtifact

        found = GgufArtifact(path)
        if found.arch != arch:
            raise LabError(
                f"{path}: general.architecture is {found.architecture}, but the model is {arch}; choose its model=, or model=gguf for what the file says"
            )
        return found
    if path.suffix == ".vqf" or (path.is_dir() and not (path / "model.safetensors").is_file() and any((path / name).is_file() for name in FILE_NAMES)):
        from lab.artifacts.vqf import VqfArtifact

        vqf = VqfArtifact(path)
        if vqf.arch != arch:
            raise LabError(f"{path}: the header describes a {vqf.arch} model, but the model is {arch}; choose its model=")
        return vqf
    return HfArtifact(path, arch)
