"""Files that hold weights: opening, reading, checking, identifying.

One door: what a path points at decides the format, and nothing behind it asks again.
"""

from __future__ import annotations

from pathlib import Path

from lab.artifacts.checkpoint import Checkpoint
from lab.artifacts.hf import HfArtifact, HfWeights
from lab.artifacts.inspection import corpus_facts, load_tokenizer
from lab.artifacts.weights import Artifact, Stored, Weights
from lab.errors import LabError

__all__ = ["Artifact", "Checkpoint", "HfArtifact", "HfWeights", "Stored", "Weights", "corpus_facts", "load_tokenizer", "open_artifact"]


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
    return HfArtifact(path, arch)
