"""From the command line to cells: compose with Hydra, check, freeze.

Hydra only composes here: its compose API touches neither the working folder nor the disk, and no `hydra.main` owns the process. Whatever
is wrong with the configuration leaves as one `LabError` line that names the key. A composed cell is well-formed; that its files exist and
that its path runs is for preflight and evidence to say.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.override_parser.types import Override
from pydantic import ValidationError

from lab.cell import COMPONENTS, SYNTHETIC, Cell
from lab.composition import changed, composed
from lab.devices import auto_device
from lab.errors import LabError, flat
from lab.overrides import GROUPS, check_groups, check_keys, expand, hydra_words, is_plain_change, parse
from lab.project import Project, find_project

ENGINES = ("local", "llama_cpp", "transformers", "server")
"""What can execute a cell. engine=auto is `server` for a path that names one, else `local`."""

ARCHITECTURES = ("qwen4_exp", "qwen3", "qwen3_moe", "llama")
"""Model architectures that can be named, planned and registered (`model.arch`); which of them an engine has code for is for preflight to say."""

AUTO_ARCH = "auto"
"""`model.arch` of a model that is whatever its GGUF file says."""

_SETTINGS = ("force",)
"""Top-level keys that steer the run and are no part of a cell."""


@dataclass(frozen=True)
class Plan:
    """What one command asks for: its cells, each once, and whether to measure again what is already there."""

    cells: tuple[Cell, ...]
    force: bool


def plan(project: Project, words: Sequence[str], multirun: bool = False, with_codecs: bool = True) -> Plan:
    """Compose every cell that `words` ask for. All are checked before any is returned. Raises LabError.

    `with_codecs` also checks the codecs of components that were changed by hand, which imports torch: not where cells are only looked up.
    """
    given = _with_model(parse(words))
    if fixed := next((o for o in given if o.key_or_group in ("device.expect", "device.name")), None):
        raise LabError(f"{fixed.key_or_group}: says which card the name of a device file means; add a file in conf/device instead")
    cells: dict[str, Cell] = {}
    force = False
    for single in expand(given, project.conf, multirun):
        config = _config(project, single)
        force = _flag(config, "force") or force
        cell = _cell(project, config)
        if with_codecs and cell.path.unsupported is None and any(o.key_or_group.startswith("path.components") for o in single):
            _check_codecs(cell)
        cells.setdefault(cell.hash, cell)
    return Plan(tuple(cells.values()), force)


def compose_cells(words: Sequence[str], project: Project | None = None) -> list[Cell]:
    """The cells that `words` ask for, commas included, in the current project unless one is given; for looking up. Raises LabError."""
    return list(plan(project or find_project(), words, multirun=True, with_codecs=False).cells)


def known_keys(project: Project, words: Sequence[str]) -> tuple[str, ...]:
    """The dotted keys of the configuration that the choices among `words` compose to; only these can be overridden without a `+`."""
    return _keys(project.conf.resolve(), _chosen(project, _with_model(parse(words))))


def sizes_file(project: Project, artifact: str, geometry: str, source: str = "") -> Path | None:
    """The file that holds a model's sizes: the artifact itself where it is a GGUF or VQF file, its config.json, that of `source`, the geometry for planning,
    or None.

    Raises LabError for a geometry that is named and not there.
    """
    whole = project.path(artifact)
    if whole.suffix in (".gguf", ".vqf") and whole.is_file():
        return whole
    for folder in filter(None, (artifact, source)):
        if (own := project.path(folder) / "config.json").is_file():
            return own
    if not geometry:
        return None
    if not project.path(geometry).is_file():
        raise LabError(f"{geometry}: no such file (model.geometry)")
    return project.path(geometry)


def model_layers(project: Project, artifact: str, geometry: str = "", source: str = "") -> int | None:
    """Number of layers in the model's `sizes_file`, or None where there is none. Raises LabError if that file names no number."""
    file = sizes_file(project, artifact, geometry, source)
    if file is None:
        return None
    if file.suffix in (".gguf", ".vqf"):
        try:
            return gguf_header(file).layers if file.suffix == ".gguf" else _vqf_layers(file, file.stat().st_mtime_ns)
        except LabError:
            # A damaged file is for preflight to refuse: its cells must still compose, or no matrix could show their earlier records.
            other = sizes_file(project, "", geometry, source)
            if other is None:
                raise
            file = other
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise LabError(f"{project.short(file)}: not readable as JSON ({error})") from None
    text = data.get("text_config", data) if isinstance(data, dict) else {}
    layers = text.get("num_hidden_layers") if isinstance(text, dict) else None
    if not isinstance(layers, int) or layers < 1:
        raise LabError(f"{project.short(file)}: num_hidden_layers is missing or not a positive number")
    return layers


class GgufHeader(NamedTuple):
    """What composition needs of a GGUF file; `arch` in the lab's words."""

    arch: str
    layers: int
    vocab_size: int


def gguf_header(file: Path) -> GgufHeader:
    """The header of a GGUF file. Raises LabError. Imports torch, which costs a second: for cells that name such a file only."""
    return _gguf_header(file, file.stat().st_mtime_ns)


@cache
def _gguf_header(file: Path, changed_ns: int) -> GgufHeader:
    from lab.artifacts.gguf_model import GgufArtifact

    found = GgufArtifact(file)
    config = found.config()
    return GgufHeader(found.arch, config.num_layers, config.vocab_size)


@cache
def _vqf_layers(file: Path, changed_ns: int) -> int:
    """Layers by a VQF file's header, whatever its layout: that is for the gate to refuse."""
    from lab.artifacts.vqf_file import VqfFile

    return VqfFile(file).header.arch.n_layers


def _with_model(given: list[Override]) -> list[Override]:
    """With model=gguf where a GGUF file is given and no model: it says itself what it is."""
    files = [o for o in given if o.key_or_group == "artifact" and str(o.input_line).rstrip("'\"").endswith(".gguf")]
    return [*parse(["model=gguf"]), *given] if files and not any(o.key_or_group == "model" for o in given) else given


def _config(project: Project, overrides: Sequence[Override]) -> dict[str, Any]:
    """The composed configuration as plain data. Group names and keys are checked first, for readable errors."""
    chosen = _chosen(project, overrides)
    values = [o for o in overrides if o.key_or_group not in GROUPS]
    if values:
        check_keys(values, _keys(project.conf.resolve(), chosen))
    conf = project.conf.resolve()
    plain = changed(conf, chosen, values) if all(map(is_plain_change, values)) else composed(conf, (*chosen, *hydra_words(values)))
    return {str(key): value for key, value in plain.items()}


def _chosen(project: Project, overrides: Sequence[Override]) -> tuple[str, ...]:
    """The choices as Hydra's words; the device is always among them."""
    check_groups(overrides, project.conf)
    groups = [o for o in overrides if o.key_or_group in GROUPS and o.key_or_group != "device"]
    device = next((o.get_value_element_as_str() for o in overrides if o.key_or_group == "device"), "auto")
    return (*hydra_words(groups), f"device={auto_device() if device == 'auto' else device}")


@cache
def _keys(conf: Path, words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_dotted(composed(conf, words)))


def _cell(project: Project, config: dict[str, Any]) -> Cell:
    config = {key: value for key, value in config.items() if key not in _SETTINGS}
    model = config.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("artifact"), str):
        raise LabError("model.artifact: must be the path of the model's files")
    geometry = model.get("geometry", "")
    if not isinstance(geometry, str):
        raise LabError("model.geometry: must be the path of a config.json, or left out")
    config["model"] = model = _with_artifact(project, model, config.pop("artifact", None))
    config["engine"] = _engine(config)
    total = model_layers(project, model["artifact"], str(model.get("geometry", "")), str(model.get("source", "")))
    config["layers"] = _layers(config.get("layers"), str(model.get("name")), model["artifact"], total)
    try:
        cell = Cell.model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise LabError(f"{key}: unknown key; python -m lab show prints all keys") from None
        if first["type"] == "value_error":
            # Raised by a rule over several keys in `lab.cell`, which names them itself.
            raise LabError(flat(first["ctx"]["error"])) from None
        shown = f"={first['input']}" if isinstance(first["input"], str | int | float) else ""
        raise LabError(f"{key}{shown}: {flat(first['msg'])}") from None
    unknown = sorted(cell.path.components.keys() - set(COMPONENTS))
    if unknown:
        raise LabError(f"path.components.{unknown[0]}: no such component; choose from {', '.join(COMPONENTS)}")
    for rule in cell.path.evidence:
        if rule.component not in cell.path.components:
            raise LabError(f"path.evidence: {rule.component} is not among the path's components")
    if cell.engine not in ENGINES:
        raise LabError(f"engine={cell.engine}: no such engine; choose one of: auto, {', '.join(ENGINES)}")
    if (cell.engine == "server") != (cell.path.server is not None):
        named = f"path {cell.path.name} names {'a' if cell.path.server else 'no'} server"
        raise LabError(f"engine={cell.engine}: {named}; use engine=auto, or a path with a server: block for engine=server")
    if cell.engine == "llama_cpp" and cell.path.format != "gguf":
        raise LabError(f"engine=llama_cpp: runs GGUF files, and path {cell.path.name} does not; use path=gguf_plugin artifact=FILE.gguf")
    if cell.model.table_rows is not None and cell.model.artifact != SYNTHETIC:
        raise LabError(f"model.table_rows={cell.model.table_rows}: only for artifact={SYNTHETIC}; a real file's table has the rows that it has")
    if cell.model.arch not in ARCHITECTURES:
        raise LabError(f"model.arch={cell.model.arch}: no such architecture; choose one of: {', '.join(ARCHITECTURES)}")
    if cell.disable is not None and cell.engine != "local":
        raise LabError(f"disable={cell.disable}: only engine=local can have something made to fail, and this is engine={cell.engine}")
    _check_names(project, cell)
    if cell.path.server is not None and total is not None and cell.layers < total and not any("{layers}" in word for word in cell.path.server.command):
        untold = f"the server of path {cell.path.name} is not told how many layers to keep"
        raise LabError(f"layers={cell.layers}: {untold}, so it runs all {total}; use layers={total}")
    return cell


def _with_artifact(project: Project, model: dict[str, Any], given: Any) -> dict[str, Any]:
    """The model with the files of `artifact=`, its own becoming what divergence is measured against; and with the architecture that a GGUF file names."""
    if given is not None and (not isinstance(given, str) or not given):
        raise LabError(f"artifact={given}: must be the path of the model's files")
    if given == SYNTHETIC:
        sizes = str(model.get("geometry") or "") or f"{model['artifact']}/config.json"
        return {**model, "artifact": SYNTHETIC, "geometry": sizes, "source": ""}
    if given is not None and project.path(given).resolve() != project.path(model["artifact"]).resolve():
        model = {**model, "artifact": given, "source": model.get("source") or model["artifact"]}
    if not model["artifact"]:
        raise LabError(f"model={model.get('name')}: name its file with artifact=FILE.gguf")
    if model.get("arch") == AUTO_ARCH:
        file = project.path(model["artifact"])
        if file.suffix != ".gguf" or not file.is_file():
            what = "no such file" if not file.exists() else "not a .gguf file"
            raise LabError(f"{model['artifact']}: {what}; model={model.get('name')} takes its architecture from a GGUF file (artifact=FILE.gguf)")
        model = {**model, "arch": gguf_header(file).arch}
    return model


def _engine(config: dict[str, Any]) -> Any:
    """The engine asked for, or with `auto` the one that the path needs."""
    path = config.get("path")
    served = isinstance(path, dict) and path.get("server") is not None
    return ("server" if served else "local") if config.get("engine", "auto") == "auto" else config["engine"]


def _layers(asked: Any, model: str, artifact: str, total: int | None) -> int:
    """The number of layers to run: all `total` where `asked` is None, else `asked`, which must lie within the model."""
    if asked is None:
        if total is None:
            raise LabError(f"{artifact}/config.json is missing, so that the number of layers is unknown: get the model or give layers=N")
        return total
    span = f"choose 1 to {total}" if total else "choose 1 or more"
    if isinstance(asked, bool) or not isinstance(asked, int):
        raise LabError(f"layers={asked}: not a whole number; {span}")
    if asked < 1 or (total is not None and asked > total):
        has = f"{model} has {total} layers; " if total else ""
        raise LabError(f"layers={asked}: {has}{span}")
    return asked


def _check_names(project: Project, cell: Cell) -> None:
    """Each choice carries the name of its file: records, ids and fill commands rely on it."""
    for key, spec in (("model", cell.model), ("path", cell.path), ("device", cell.device), ("bench", cell.bench)):
        if not (project.conf / GROUPS[key] / f"{spec.name}.yaml").is_file():
            raise LabError(f"{key}.name={spec.name}: the name is that of the file in conf/{GROUPS[key]}; add a file instead")


def _check_codecs(cell: Cell) -> None:
    """Raises LabError for a codec or option that does not exist."""
    from lab.codecs import create

    for component, part in cell.path.components.items():
        if part.codec == "source" and part.options:
            raise LabError(f"path.components.{component}: codec source takes no options, got {', '.join(sorted(part.options))}; choose a codec too")
        if part.codec != "source":
            try:
                create(part.codec, part.options)
            except LabError as error:
                raise LabError(f"path.components.{component}: {error}") from None


def _flag(config: dict[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise LabError(f"{key}={value}: must be true or false")
    return value


def _dotted(tree: Any, prefix: str = "") -> list[str]:
    keys: list[str] = []
    for key, value in tree.items() if isinstance(tree, dict) else ():
        keys.append(f"{prefix}{key}")
        keys.extend(_dotted(value, f"{prefix}{key}."))
    return keys
