"""Builds the C++ sources of this package into a shared library at first use, and loads it.

Why a plain compiler call: the sources include no Python or torch header, so they need neither Python.h nor ninja and compile in seconds; Python calls them
through ctypes. Threads come from the OpenMP runtime that torch has loaded, so that there is one pool of them.
The library's name is a digest of sources, flags, compiler, torch version and CPU features: a stale or foreign binary is never loaded. It is built under a
lock, sealed with its own digest and put in place by renaming.
What it does not prove: that the compiler is right; the tests compare what it makes with the codecs.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from lab.errors import flat

_SOURCES = Path(__file__).with_name("src")
# No contraction: a decode's product and sum round one after the other, as in ggml.
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fopenmp", "-fPIC", "-shared", "-w")
_TUNED = (("-march=native",), ("-mcpu=native",), ())  # in order of preference; some compilers and CPUs know only one of them
_TIMEOUT_S = 300


class BuildError(Exception):
    """Why there is no library, in one line."""


def cache_folder() -> Path:
    """Where libraries are kept: LAB_NATIVE_CACHE, or the checkout's .cache, or the user's cache folder where the package is installed elsewhere."""
    named = os.environ.get("LAB_NATIVE_CACHE")
    if named:
        return Path(named).resolve()
    checkout = Path(__file__).resolve().parents[3]
    if (checkout / "pyproject.toml").is_file() and os.access(checkout, os.W_OK):
        return checkout / ".cache" / "native"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "migration-lab" / "native"


def build(folder: Path, extra: tuple[str, ...] = (), tuned: tuple[tuple[str, ...], ...] = _TUNED) -> Path:
    """The library in `folder`, made if it is not there. `extra` flags make a library of their own. Raises BuildError."""
    if sys.byteorder != "little":
        raise BuildError("the kernels read little-endian blocks and this CPU is big-endian")
    compiler = _compiler()
    library = folder / f"native-{_digest(compiler, extra, tuned)}.so"
    try:
        if _whole(library):
            return library
        with _lock(folder):
            if not _whole(library):
                _compile(compiler, extra, tuned, library)
    except OSError as error:
        raise BuildError(f"cannot write {folder}: {flat(error)}; set LAB_NATIVE_CACHE to a folder that can be written") from None
    return library


def load(folder: Path) -> ctypes.CDLL:
    """The library, built if needed. Raises BuildError."""
    try:
        return ctypes.CDLL(str(build(folder)))
    except OSError as error:
        raise BuildError(f"the library that was built does not load: {flat(error)}") from None


def sources() -> list[Path]:
    """Every file the library is made of."""
    return sorted(path for path in _SOURCES.iterdir() if path.suffix in (".cpp", ".h"))


def _compiler() -> str:
    named = os.environ.get("CXX")
    for name in [named] if named else ["c++", "g++", "clang++"]:
        found = shutil.which(name)
        if found:
            return found
    if named:
        raise BuildError(f"no C++ compiler: CXX={named} is not on PATH")
    raise BuildError("no C++ compiler (c++, g++ or clang++) on PATH; install one, e.g. the package g++")


def _compile(compiler: str, extra: tuple[str, ...], tuned: tuple[tuple[str, ...], ...], library: Path) -> None:
    partial = library.with_suffix(".partial")  # one name: the lock is held, and what a killed build left is overwritten
    failure = ""
    for tuning in tuned:
        command = [compiler, *_FLAGS, *tuning, *extra, *map(str, (p for p in sources() if p.suffix == ".cpp")), *_openmp(), "-o", str(partial)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise BuildError(f"{compiler} did not finish in {_TIMEOUT_S} s") from None
        if done.returncode == 0:
            content = partial.read_bytes()
            partial.write_bytes(content + hashlib.sha256(content).digest())
            os.replace(partial, library)
            return
        partial.unlink(missing_ok=True)
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or [f"exit code {done.returncode}"]
        failure = failure or flat(lines[0])
    raise BuildError(f"{compiler} failed: {failure}")


def _whole(library: Path) -> bool:
    """Whether the file is there and ends with the digest of the rest: loading one that was cut short would kill the process, not raise."""
    if not library.is_file():
        return False
    content = library.read_bytes()
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _openmp() -> list[str]:
    """torch's own copy of libgomp, where its wheel has one: a second copy would mean a second pool of threads that waits on the same cores."""
    copies = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return ["-Wl,--as-needed", str(copies[0])] if copies else []


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # let go when the file closes, also when the process dies
        yield


def _digest(compiler: str, extra: tuple[str, ...], tuned: tuple[tuple[str, ...], ...]) -> str:
    told = [torch.__version__, *_openmp(), *_FLAGS, *extra, repr(tuned), compiler, _version(compiler), platform.machine(), _cpu()]
    digest = hashlib.sha256("\0".join(told).encode())
    for path in sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


def _version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, errors="replace", timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{compiler} --version failed: {flat(error)}") from None


@cache
def _cpu() -> str:
    """The first CPU's model and features as Linux tells them; where it does not, the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    stable = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU implementer", "CPU part", "isa")
    return "\n".join(line for line in lines if line.split(":")[0].strip() in stable)
