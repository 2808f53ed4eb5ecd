"""YAML that remembers its lines, so that an error can name the file and the line of the key at fault.

PyYAML's loader forgets where a value stood; its node tree knows. Used for files people write by hand and whose mistakes must be one line
(`experiments/*.yaml`). It refuses a key given twice, which YAML would settle silently in favour of the last. It checks no schema.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from lab.errors import LabError

Loc = tuple[str | int, ...]
"""A place in the file, as pydantic writes it: keys and list positions from the top."""


class MarkedYaml:
    """One parsed YAML mapping: `data`, its bytes `raw`, and `error` for a message about a place in it."""

    def __init__(self, path: Path) -> None:
        """Read and parse `path`. Raises LabError if it is not a YAML mapping."""
        self.raw = path.read_bytes()
        self.source = f"{path.parent.name}/{path.name}"
        try:
            node = yaml.compose(self.raw, Loader=yaml.SafeLoader)
            self._node = node if node is not None else yaml.MappingNode("", [], yaml.Mark("", 0, 0, 0, None, 0))
            self._refuse_repeated_keys(self._node)
            self.data: Any = yaml.safe_load(self.raw)
        except (yaml.YAMLError, ValueError, RecursionError) as err:  # a ValueError: bytes that are no text, or a date that is none
            mark = getattr(err, "problem_mark", None)
            problem = getattr(err, "problem", None) or str(err).splitlines()[0]
            raise LabError(f"{self.source}:{mark.line + 1 if mark else 1}: not valid YAML: {problem}") from err
        if not isinstance(self.data, dict):
            raise LabError(f"{self.source}:1: expected keys and values, found {'nothing' if self.data is None else 'something else'}")

    def error(self, loc: Loc, message: str) -> LabError:
        """The one-line error about the place `loc`."""
        return LabError(f"{self.source}:{self.line(loc)}: {'.'.join(str(part) for part in loc) or 'file'}: {message}")

    def line(self, loc: Loc) -> int:
        """The 1-based line of the deepest part of `loc` that is in the file; a missing key points at its parent."""
        node = self._node
        line: int = node.start_mark.line + 1
        for part in loc:
            if isinstance(node, yaml.MappingNode):
                found = [(key, value) for key, value in node.value if key.value == str(part)]
                if not found:
                    break
                line, node = found[0][0].start_mark.line + 1, found[0][1]
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                line = node.start_mark.line + 1
        return line

    def _refuse_repeated_keys(self, node: yaml.Node) -> None:
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                if str(key.value) in seen:
                    raise LabError(f"{self.source}:{key.start_mark.line + 1}: the key '{key.value}' appears twice")
                seen.add(str(key.value))
                self._refuse_repeated_keys(value)
        elif isinstance(node, yaml.SequenceNode):
            for value in node.value:
                self._refuse_repeated_keys(value)
