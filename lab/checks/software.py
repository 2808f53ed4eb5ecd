"""Interpreter, packages, and environment variables that change what runs or how fast.

Found by name: a variable that nobody has heard of here is not seen, and an installed package can still be broken.
"""

from __future__ import annotations

import os
import platform

from lab.checks.check import Finding, bad, check, ok, warn
from lab.provenance import environment, package_versions

_NEEDED = ("torch", "hydra-core", "safetensors", "tokenizers")
_OPTIONAL = ("mlflow", "triton", "transformers")
"""mlflow among them: a host that only measures does without, and its records are exported."""
_ALSO = (
    "CUDA_DEVICE_ORDER",
    "GOMP_CPU_AFFINITY",
    "GPU_MAX_HW_QUEUES",
    "HSA_ENABLE_IPC_MODE_LEGACY",
    "HSA_ENABLE_SDMA",
    "LD_PRELOAD",
    "OMP_PROC_BIND",
    "ROCBLAS_USE_HIPBLASLT",
    "TORCH_BLAS_PREFER_HIPBLASLT",
)
"""Known to move speeds or paths, beside those that provenance keeps (GPU_MAX_HW_QUEUES and the HSA ones: public reports about Paiton and vLLM)."""
_HARMFUL = {
    "AMD_SERIALIZE_COPY": "every copy waits",
    "AMD_SERIALIZE_KERNEL": "every kernel waits",
    "CUDA_LAUNCH_BLOCKING": "every kernel waits",
    "HIP_LAUNCH_BLOCKING": "every kernel waits",
    "HSA_OVERRIDE_GFX_VERSION": "kernels of another chip run",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every allocation goes to the driver",
    "TRITON_INTERPRET": "Triton kernels run in the Python interpreter",
}


@check("python")
def packages() -> Finding:
    """Versions of the interpreter and of the packages that a run uses."""
    versions = package_versions((*_NEEDED, *_OPTIONAL))
    said = f"{platform.python_version()}; " + ", ".join(f"{name} {found or 'not installed'}" for name, found in versions.items())
    missing = [name for name in _NEEDED if not versions[name]]
    return bad(said, f"make run sets everything up; or pip install {' '.join(missing)}") if missing else ok(said)


@check("environment")
def variables() -> Finding:
    """Variables that are set and known to change a path or its speed."""
    found = environment() | {name: os.environ[name] for name in (*_ALSO, *_HARMFUL) if name in os.environ}
    if not found:
        return ok("nothing set that is known to change a path")
    harmful = [name for name in sorted(found.keys() & _HARMFUL.keys()) if found[name].strip() not in ("", "0")]
    said = ", ".join(f"{name}={value}{f' ({_HARMFUL[name]})' if name in harmful else ''}" for name, value in sorted(found.items()))
    return warn(said, f"unset {' '.join(harmful)}, unless that is what you mean to measure") if harmful else ok(said)
