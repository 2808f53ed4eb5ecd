"""transformers, imported only here: which version, which classes, which of its optional kernels can be imported.

Why by name at run time: the package is an extra and takes seconds to import; without it a cell of this engine is a gap that names the extra. That a kernel
package can be imported is no proof that the model used it: transformers falls back to plain torch without failing.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from lab.attempt import one_line
from lab.errors import GapError
from lab.record import Status

EXTRA = "pip install 'migration-lab[transformers]'"
CLASSES = {
    "qwen4_exp": "Qwen4ExpForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
}
"""Architecture of a cell -> transformers' text model."""
_KERNELS = {"fla": "fla-core", "causal_conv1d": "causal-conv1d", "flash_attn": "flash-attn", "kernels": "kernels"}
"""Modules that transformers takes faster functions from where they can be imported, and the packages that bring them."""


def library() -> Any:
    """The module `transformers`, quiet. Raises GapError (UNSUPPORTED) naming the extra where it is missing, or what is wrong where it does not load."""
    try:
        found = import_module("transformers")
        found.logging.set_verbosity_error()
        found.logging.disable_progress_bar()
    except ModuleNotFoundError as error:
        raise GapError(Status.UNSUPPORTED, f"engine=transformers needs {error.name}: {EXTRA}") from None
    except (ImportError, OSError, RuntimeError) as error:
        raise GapError(Status.UNSUPPORTED, f"transformers does not load ({one_line(error)}): {EXTRA}") from None
    return found


def model_class(lib: Any, arch: str) -> Any:
    """transformers' class for the architecture. Raises GapError (UNSUPPORTED) where this version has none."""
    name = CLASSES.get(arch)
    try:
        found = getattr(lib, name) if name else None
    except (AttributeError, ImportError, RuntimeError) as error:
        raise GapError(Status.UNSUPPORTED, f"transformers {lib.__version__} has no working {name}: {one_line(error)}") from None
    if found is None:
        raise GapError(Status.UNSUPPORTED, f"no class of transformers is known for the architecture {arch}")
    return found


def facts(lib: Any) -> dict[str, Any]:
    """{version, kernels: {module: version of its package, or None where it cannot be imported}}."""
    return {"version": str(lib.__version__), "kernels": {module: _version(module, package) for module, package in _KERNELS.items()}}


def _version(module: str, package: str) -> str | None:
    if find_spec(module) is None:
        return None
    for name in (package, module):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"
