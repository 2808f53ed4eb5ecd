"""The verb `ls`: every choice the command line takes, read from the files that define them.

Nothing is listed that is not there, so that a new YAML file needs no second entry anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import yaml

from lab.errors import LabError
from lab.overrides import GROUPS, choices
from lab.project import Project


def print_choices(project: Project, kinds: Sequence[str]) -> None:
    """Print the choices of the named kinds, or of all. Raises LabError for an unknown kind."""
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise LabError(f"{unknown[0]}: nothing to list by that name; choose from: {', '.join(KINDS)}")
    for kind in kinds or KINDS:
        print(f"{kind}:")
        for line in KINDS[kind](project) or ["(none)"]:
            print(f"  {line}")


def _group(key: str) -> Callable[[Project], list[str]]:
    def lines(project: Project) -> list[str]:
        return [f"{key}={name}" + _about(project, key, name) for name in choices(project.conf, key)]

    return lines


def _about(project: Project, key: str, name: str) -> str:
    data = yaml.safe_load((project.conf / GROUPS[key] / f"{name}.yaml").read_text())
    about = f"  {data['title']}" if "title" in data else ""
    return about + (f"  [unsupported: {data['unsupported'].strip()}]" if data.get("unsupported") else "")


def _devices(project: Project) -> list[str]:
    return ["device=auto  cuda if torch can use a GPU here, else cpu (the default)", *_group("device")(project)]


def _codecs(_project: Project) -> list[str]:
    from lab.codecs import KNOWN

    return ["source  as in the artifact", *sorted(KNOWN)]


def _experiments(project: Project) -> list[str]:
    return [f"experiment={file.stem}" for file in sorted((project.root / "experiments").glob("*.yaml"))]


KINDS: dict[str, Callable[[Project], list[str]]] = {
    "models": _group("model"),
    "paths": _group("path"),
    "devices": _devices,
    "benches": _group("bench"),
    "codecs": _codecs,
    "experiments": _experiments,
}
