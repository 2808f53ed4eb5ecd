"""Hydra, as far as the lab uses it: choices and overrides in, plain resolved values out.

Apart from `lab.compose`, which decides what a cell is, so that everything that Hydra and OmegaConf do or complain about is in one place. Whatever they have
to say leaves as one `LabError` line.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lab.errors import LabError, flat


def changed(conf: Path, chosen: tuple[str, ...], values: Sequence[Override]) -> dict[Any, Any]:
    """What Hydra would compose of `chosen` and plain changes of existing keys, from one composition of the choices.

    Hydra takes a tenth of a second each time, and an experiment's cells differ mostly in such keys; this is the same update Hydra itself does last.
    """
    config = copy.deepcopy(_composition(conf, chosen))
    try:
        for override in values:
            OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
    except OmegaConfBaseException as error:
        raise LabError(f"configuration: {flat(error)}") from None
    return _resolved(config)


@cache
def composed(conf: Path, words: tuple[str, ...]) -> dict[Any, Any]:
    """The plain, resolved result of one composition. Raises LabError for whatever Hydra, OmegaConf or YAML has to say."""
    return _resolved(_composition(conf, words))


@cache
def _composition(conf: Path, words: tuple[str, ...]) -> DictConfig:
    """One composition, interpolations kept. Raises LabError for whatever Hydra or YAML has to say."""
    try:
        # Another composition in this process (a test, a notebook) may have left Hydra initialised.
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(conf), version_base="1.3"):
            return hydra_compose("config", overrides=list(words))
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise LabError(f"configuration: {flat(error)}") from None


def _resolved(config: DictConfig) -> dict[Any, Any]:
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise LabError(f"configuration: {flat(error)}") from None
    assert isinstance(plain, dict)
    return plain
