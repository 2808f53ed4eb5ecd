"""transformers' model of a cell: from the artifact's files by its own loading, or at true size with its own random initialisation.

A smaller depth is a smaller `num_hidden_layers` in the same configuration; weights of later layers stay unread. A weight that the files do not hold would be
drawn at random by transformers, with a warning: here it is a failed load. Sizes of a synthetic model are those of `model.geometry`.
What it does not prove: that the values are the files'; perplexity and divergence beside the lab's own engine show that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lab.artifacts import SyntheticArtifact, open_model
from lab.attempt import one_line
from lab.cell import Cell
from lab.engines.hf.library import facts, library, model_class
from lab.engines.local import is_out_of_memory
from lab.errors import GapError
from lab.models.fields import config_json
from lab.record import Status

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_OTHER_PARTS = re.compile(r"(^|\.)(mtp|visual)\.")


@dataclass
class Loaded:
    """transformers' model, what the library is, and what loading said of the files."""

    model: Any
    library: dict[str, Any]
    loading: dict[str, Any] = field(default_factory=dict)


def load(cell: Cell, root: Path, device: torch.device, dtype: torch.dtype) -> Loaded:
    """The cell's first layers on `device` in `dtype`, ready to score. Raises GapError with transformers' own error, LabError for files that cannot be read."""
    lib = library()
    made = model_class(lib, cell.model.arch)
    artifact = open_model(root, cell.model)
    try:
        if isinstance(artifact, SyntheticArtifact):
            config = made.config_class(**shortened(artifact.sizes(), cell.layers))
            torch.manual_seed(0)
            with device:
                model = made._from_config(config, dtype=dtype)
            told: dict[str, Any] = {"weights": f"transformers' own initialisation, {_word(dtype)}, drawn on {device.type}"}
        else:
            model, told = _from_files(lib, made, artifact.path, cell.layers, device, dtype)
    except GapError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise GapError(Status.LOAD_FAILED, f"transformers {lib.__version__}: {type(error).__name__}: {one_line(error)}") from error
    return Loaded(model.eval(), facts(lib), told)


def shortened(data: dict[str, Any], layers: int) -> dict[str, Any]:
    """The text model's fields of a config.json for its first `layers` layers."""
    text = {**data.get("text_config", data), "num_hidden_layers": layers}
    text.pop("architectures", None)
    if text.get("layer_types"):
        text["layer_types"] = text["layer_types"][:layers]
    if text.get("ple_layer_ids"):
        text["ple_layer_ids"] = [number for number in text["ple_layer_ids"] if number <= layers]  # counted from 1
    return text


def _from_files(lib: Any, made: Any, path: Path, layers: int, device: torch.device, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """A folder in the Hugging Face layout, or a GGUF file, which transformers decodes."""
    options: dict[str, Any] = {"dtype": dtype, "output_loading_info": True}
    if path.suffix == ".gguf":
        folder, options["gguf_file"] = path.parent, path.name
        data = lib.AutoConfig.from_pretrained(folder, gguf_file=path.name).to_dict()
    else:
        folder, data = path, config_json(path / "config.json")
    if device.type == "cuda" and find_spec("accelerate") is not None:
        options["device_map"] = {"": device}
    model, info = made.from_pretrained(folder, config=made.config_class(**shortened(data, layers)), **options)
    missing = sorted(map(str, info.get("missing_keys") or ()))
    if missing:
        raise GapError(Status.LOAD_FAILED, f"transformers {lib.__version__} did not find {len(missing)} weights and would draw them at random: {missing[0]}")
    unread = sorted(name for name in map(str, info.get("unexpected_keys") or ()) if not _beyond(name, layers))
    if unread:
        raise GapError(Status.LOAD_FAILED, f"transformers {lib.__version__} left {len(unread)} weights of the files unread: {unread[0]}")
    return model.to(device), {"weights": f"by transformers from {path.name}, held as {_word(dtype)}"}


def _beyond(name: str, layers: int) -> bool:
    """Whether a weight of the files is rightly left: of a later layer, or of another part than the text model."""
    found = _LAYER.search(f".{name}")
    return (found is not None and int(found[1]) >= layers) or _OTHER_PARTS.search(name) is not None


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
