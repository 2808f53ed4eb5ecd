"""llama.cpp's log, caught line by line, and what it says about where layers, caches and buffers lie.

Why the log: there is no call that tells the device of a layer; the loader prints it, at its debug level. Lines are matched by their wording in llama.cpp
of 2026 (llama-model.cpp, llama-context.cpp, llama-kv-cache.cpp); should it change, placements are missing and the evidence check says so. The log
tells where weights were put, not that a kernel of that device computed with them.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

from lab.errors import flat
from lab.project import say

_WARN, _ERROR, _CONTINUED = 3, 4, 5
"""enum ggml_log_level of ggml.h."""

_FILE = re.compile(r"loaded meta data with .* from (.+) \(version")
_LAYER = re.compile(r"load_tensors: layer\s+(\d+) assigned to device ([^,\s]+)")
_STATE = re.compile(r"^\w+: layer\s+(\d+): dev = (\S+)")
_BUFFER = re.compile(r"^\w+:\s+(\S+)\s+(model|KV|RS|compute|output) buffer size =\s+([\d.]+) MiB")
_OFFLOADED = re.compile(r"offloaded (\d+)/(\d+) layers to GPU")
_FLASH = re.compile(r"^llama_context: flash_attn\s+= (\w+)")
_KEPT = (_FILE, _LAYER, _STATE, _BUFFER, _OFFLOADED, _FLASH)

_ALIVE: list[object] = []
"""Callbacks that llama.cpp may still call: collected, they would be a call into freed memory."""


class Log:
    """Takes over llama.cpp's log. Lines that this module reads, warnings and errors are kept; warnings and errors are also passed on."""

    def __init__(self, lib: Any) -> None:
        self.lines: list[str] = []
        self.problems: list[str] = []
        self._pending = ""
        self._level = 0
        callback = lib.llama_log_callback(self._take)
        _ALIVE.append(callback)
        lib.llama_log_set(callback, ctypes.c_void_p(0))

    def last_problem(self) -> str:
        """The last warning or error, in one line."""
        return flat(self.problems[-1]) if self.problems else "llama.cpp gave no reason"

    def _take(self, level: int, text: bytes, _data: object) -> None:
        if level != _CONTINUED:
            self._pending, self._level = "", level
        self._pending += text.decode(errors="replace")
        *whole, self._pending = self._pending.split("\n")
        for line in whole:
            self._keep(line)

    def _keep(self, line: str) -> None:
        if self._level in (_WARN, _ERROR) and line.strip(" ."):
            self.problems.append(line)
            say(f"llama.cpp: {line}")
        if any(pattern.search(line) for pattern in _KEPT):
            self.lines.append(line)


def placement(lines: list[str]) -> dict[str, Any]:
    """{file, layers: [[index, device]], states: [[index, device]], buffers_mib: {backend: {kind: MiB}}, offloaded: [n, of] or None, flash_attention}.

    `layers` has one more than the model: llama.cpp counts the output layer behind the last. `states` is the place of each layer's KV or recurrent state.
    """
    found: dict[str, Any] = {"file": None, "layers": [], "states": [], "buffers_mib": {}, "offloaded": None, "flash_attention": None}
    for line in lines:
        if match := _LAYER.search(line):
            found["layers"].append([int(match[1]), match[2]])
        elif match := _STATE.search(line):
            found["states"].append([int(match[1]), match[2]])
        elif match := _BUFFER.search(line):
            kinds = found["buffers_mib"].setdefault(match[1], {})
            kinds[match[2]] = round(kinds.get(match[2], 0.0) + float(match[3]), 2)
        elif match := _OFFLOADED.search(line):
            found["offloaded"] = [int(match[1]), int(match[2])]
        elif match := _FILE.search(line):
            found["file"] = match[1]
        elif match := _FLASH.search(line):
            found["flash_attention"] = match[1]
    return found
