"""llama-cpp-python, imported only here: what was built, for which devices.

Why by name at run time: the package compiles for minutes and is an extra; without it a cell of this engine is a gap that names the extra. Requested is not
registered, and registered is not used: a device listed here has computed nothing yet (`lab.engines.llama_cpp.log` has the place of every layer).
"""

from __future__ import annotations

import ctypes
from importlib import import_module
from typing import Any

from lab.attempt import one_line
from lab.errors import GapError
from lab.record import Status

EXTRA = "pip install 'migration-lab[llama]'"
_DEVICE_TYPES = ("CPU", "GPU", "IGPU", "ACCEL", "META")
"""enum ggml_backend_dev_type of ggml-backend.h, in its order."""


def library() -> Any:
    """The module `llama_cpp`. Raises GapError (UNSUPPORTED) naming the extra where it is missing, or naming what is wrong where it does not load."""
    try:
        return import_module("llama_cpp")
    except ModuleNotFoundError as error:
        if error.name == "llama_cpp":
            raise GapError(Status.UNSUPPORTED, f"engine=llama_cpp needs llama-cpp-python: {EXTRA}") from None
        raise GapError(Status.UNSUPPORTED, f"llama-cpp-python needs {error.name}, which is missing: {EXTRA}") from None
    except (OSError, RuntimeError) as error:  # its shared library is missing or was built for another machine
        raise GapError(Status.UNSUPPORTED, f"llama-cpp-python does not load ({one_line(error)}); build it on this machine: {EXTRA}") from None


def build_facts(lib: Any) -> dict[str, Any]:
    """{package, version, commit, system_info, gpu_offload, devices}: what this build says of itself. `commit` is None where it was built without one."""
    return {
        "package": lib.__version__,
        "version": _text(lib.llama_version()),
        "commit": _commit(),
        "system_info": " ".join(_text(lib.llama_print_system_info()).split()),
        "gpu_offload": bool(lib.llama_supports_gpu_offload()),
        "devices": devices(),
    }


def devices() -> list[dict[str, Any]]:
    """Every backend device that ggml has registered: {name, description, type}, type one of CPU, GPU, IGPU, ACCEL, META."""
    ggml = _ggml()
    for name, restype in (("count", ctypes.c_size_t), ("get", ctypes.c_void_p), ("name", ctypes.c_char_p), ("description", ctypes.c_char_p)):
        getattr(ggml, f"ggml_backend_dev_{name}").restype = restype
    ggml.ggml_backend_dev_type.restype = ctypes.c_int
    found = []
    for index in range(ggml.ggml_backend_dev_count()):
        device = ctypes.c_void_p(ggml.ggml_backend_dev_get(ctypes.c_size_t(index)))
        kind = ggml.ggml_backend_dev_type(device)
        found.append({
            "name": _text(ggml.ggml_backend_dev_name(device)),
            "description": _text(ggml.ggml_backend_dev_description(device)),
            "type": _DEVICE_TYPES[kind] if 0 <= kind < len(_DEVICE_TYPES) else str(kind),
        })  # fmt: skip
    return found


def _commit() -> str | None:
    ggml = _ggml()
    ggml.ggml_commit.restype = ctypes.c_char_p
    found = _text(ggml.ggml_commit())
    return found if found and found != "unknown" else None


def _ggml() -> Any:
    """ggml's own shared library, whose registry llama-cpp-python does not wrap."""
    return import_module("llama_cpp._ggml").libggml


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode(errors="replace")
