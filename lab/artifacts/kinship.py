"""Whether the files of `artifact=` hold the model whose name the cell carries, by the sizes that no conversion changes.

Why: a record is filed under the model's name, and a small file measured under the name of a large model would stand there as the large one's speed.
What it does not prove: that the weights are that model's; a fine-tune has the same sizes. The record holds the files' sha256.
"""

from __future__ import annotations

from pathlib import Path

from lab.cell import SYNTHETIC, ModelSpec
from lab.compose import sizes_file
from lab.errors import LabError
from lab.models import ModelConfig, read_config
from lab.models.fields import config_json
from lab.project import Project

SIZES = {"hidden_size": "width", "num_heads": "heads", "num_kv_heads": "key-value heads", "num_experts": "experts a layer"}
"""Fields of a model's config that must agree, and what people call them."""


def check_kinship(root: Path, model: ModelSpec, config: ModelConfig) -> None:
    """`config`: of the files. Raises LabError where the model's own sizes, in `model.source` or `model.geometry`, say another model. Fewer layers are a cut."""
    own = sizes_file(Project(root=root, runs=root / "runs"), "", model.geometry, model.source)
    if model.artifact == SYNTHETIC or own is None or own.resolve() == (root / model.artifact / "config.json").resolve():
        return
    wanted = read_config(model.arch, config_json(own), str(own))
    wrong = [f"{name} {have}, not {want}" for key, name in SIZES.items() if (have := getattr(config, key)) != (want := getattr(wanted, key))]
    if config.num_layers > wanted.num_layers:
        wrong.append(f"layers {config.num_layers}, not {wanted.num_layers}")
    if wrong:
        raise LabError(f"{model.artifact}: {'; '.join(wrong)}: these are no files of model={model.name}; name the model that they hold (a file in conf/model)")
