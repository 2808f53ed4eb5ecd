"""The verb `doctor`: is this machine ready to measure, and if not, what is missing.

It looks at what a run would use (interpreter, packages, device, disk, tracking store) with the same code a run uses. It measures
nothing, and a machine it calls ready can still be too small or too busy.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile

from lab.devices import accelerators, auto_device
from lab.locks import is_locked
from lab.mlflow_store import probe, tracking_uri
from lab.preflight import MIN_FREE_BYTES
from lab.project import Project
from lab.provenance import machine, package_versions
from lab.reconcile import reconcile
from lab.store import Store

_NEEDED = ("torch", "mlflow", "hydra-core", "safetensors", "tokenizers")
_OPTIONAL = ("triton", "transformers")


def examine(project: Project) -> bool:
    """Print one line per thing examined; True if nothing needed is missing."""
    good = [_versions(), _device(), _runs(project), _tracking(project)]
    return all(good)


def _line(fine: bool, name: str, text: str) -> bool:
    print(f"{'ok ' if fine else 'BAD'}  {name:8} {text}")
    return fine


def _versions() -> bool:
    versions = package_versions((*_NEEDED, *_OPTIONAL))
    text = ", ".join(f"{name} {found or 'not installed'}" for name, found in versions.items())
    return _line(all(versions[name] for name in _NEEDED), "versions", f"python {platform.python_version()}, {text}")


def _device() -> bool:
    facts = machine()
    gpus = ", ".join(accelerators()) or "no GPU"
    memory = facts["memory_bytes"] / 2**30
    return _line(True, "device", f"auto = {auto_device()}; {facts['cpu']}, {facts['cores']} cores, {memory:.0f} GiB, {gpus}")


def _runs(project: Project) -> bool:
    store = Store(project.runs)
    try:
        project.runs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=project.runs):
            free = shutil.disk_usage(project.runs).free
    except OSError as error:
        return _line(False, "runs", f"{project.short(project.runs)}: {error.strerror}")
    fine = _line(free >= MIN_FREE_BYTES, "runs", f"{project.short(project.runs)}, {free / 2**30:.1f} GiB free")
    closed = reconcile(store)
    running = [f for f in store.unfinished() if is_locked(f / "running.json")]
    bad = store.unreadable()
    text = f"{len(store.record_files())}, {len(bad)} unreadable, {len(running)} attempts running, {len(closed)} closed now"
    for file, why in bad:
        text += f"; {project.short(file)}: {why}"
    return _line(not bad, "records", text) and fine


def _tracking(project: Project) -> bool:
    uri = tracking_uri(project)
    try:
        probe(uri, 2.0)
    except Exception as error:
        # OSError, sqlite3.Error, or what a malformed address raises: all mean that records cannot be mirrored now.
        return _line(False, "mlflow", f"{uri}: {' '.join(str(error).split())}")
    return _line(os.access(project.root, os.W_OK), "mlflow", f"{uri} answers")
