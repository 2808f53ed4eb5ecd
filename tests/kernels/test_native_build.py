"""How the native library is built, cached and refused; and that every branch of its source decodes alike, also those this CPU would not choose."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lab.codecs import create
from lab.codecs.gguf import GGUF_CODECS, PART
from lab.codecs.gguf_types import TYPES
from lab.errors import LabError
from lab.kernels import native
from lab.kernels.native import build, calls
from tests.codecs.gguf_blocks import packed_rows

needs_compiler = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
ROOT = Path(__file__).resolve().parents[2]
ASK = "from lab.kernels import native; print(native.unavailable())"


def asking(cache: Path, **environment: str) -> subprocess.Popen[str]:
    """A fresh process that says what is missing, on one line."""
    kept = {key: value for key, value in os.environ.items() if key not in ("LAB_NATIVE", "CXX")}
    environment = {**kept, "LAB_NATIVE_CACHE": str(cache), **environment}
    return subprocess.Popen([sys.executable, "-c", ASK], env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def reason(cache: Path) -> str:
    """Why this process cannot build into `cache`."""
    with pytest.raises(build.BuildError) as told:
        build.load(cache)
    assert "\n" not in str(told.value)
    return str(told.value)


def compiler(folder: Path, script: str) -> str:
    """An executable that answers --version and does `script` otherwise."""
    path = folder / "compiler"
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit 0\n{script}\n')
    path.chmod(0o755)
    return str(path)


def test_without_a_compiler_there_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = asking(tmp_path, PATH="").communicate()[0]
    assert told == "no native kernels: no C++ compiler (c++, g++ or clang++) on PATH; install one, e.g. the package g++\n"
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert reason(tmp_path) == "no C++ compiler: CXX=no-such-compiler is not on PATH"


def test_a_compiler_that_fails_leaves_a_reason_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = 'while [ "$1" != -o ]; do shift; done; echo half > "$2"; echo "note" >&2; echo "x.cpp:1: error: no good" >&2; echo "error: later" >&2; exit 1'
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    assert reason(tmp_path / "cache").endswith("compiler failed: x.cpp:1: error: no good")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]


def test_what_does_not_load_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, 'while [ "$1" != -o ]; do shift; done; echo junk > "$2"'))
    assert reason(tmp_path / "cache").startswith("the library that was built does not load: ")


def test_a_cache_that_cannot_be_written_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CXX", compiler(tmp_path, "exit 0"))
    told = reason(tmp_path / "file" / "cache")
    assert told.startswith("cannot write ") and told.endswith("set LAB_NATIVE_CACHE to a folder that can be written")


@needs_compiler
def test_two_processes_build_once_and_a_broken_file_is_built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = compiler(tmp_path, f'echo built >> "{tmp_path}/count"; exec {build._compiler()} "$@" -O0')
    cache, count = tmp_path / "cache", tmp_path / "count"
    processes = [asking(cache, CXX=counted) for _ in range(2)]
    assert [process.communicate()[0] for process in processes] == ["None\n"] * 2
    assert count.read_text() == "built\n"
    (library,) = cache.glob("*.so")
    assert sorted(path.name for path in cache.iterdir()) == ["lock", library.name]
    library.write_bytes(library.read_bytes()[:3000])
    monkeypatch.setenv("CXX", counted)
    build.load(cache)
    assert count.read_text() == "built\n" * 2


def test_lab_native_0_switches_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_NATIVE", "0")
    assert native.unavailable() == "native kernels are switched off by LAB_NATIVE=0"
    with pytest.raises(LabError, match="switched off by LAB_NATIVE=0; use lab.ops$"):
        native.product("bf16", {"weight": torch.ones(2, 16, dtype=torch.bfloat16)}, torch.ones(1, 16))
    assert native.supports("bf16")


@needs_compiler
def test_the_name_follows_source_flags_compiler_and_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every input of the build moves the file's name, so that no library made from others is loaded. Nothing is compiled here."""
    seen: list[str] = []
    monkeypatch.setattr(build, "_compile", lambda compiler, extra, tuned, library: seen.append(library.name))
    copy = tmp_path / "src"
    shutil.copytree(build._SOURCES, copy)
    build.build(tmp_path)
    build.build(tmp_path, extra=("-DX",))
    build.build(tmp_path, tuned=((),))
    monkeypatch.setattr(build, "_SOURCES", copy)
    build.build(tmp_path)
    (copy / "simd.h").write_text((copy / "simd.h").read_text() + "\n")
    build.build(tmp_path)
    monkeypatch.setattr(build, "_cpu", lambda: "another")
    build.build(tmp_path)
    monkeypatch.setattr(build, "_version", lambda compiler: "another")
    build.build(tmp_path)
    monkeypatch.setattr(torch, "__version__", "another")
    build.build(tmp_path)
    assert seen[0] == seen[3] and len(set(seen)) == len(seen) - 1


@needs_compiler
def test_blocks_have_the_sizes_of_the_format() -> None:
    library, facts, sizes = ctypes.CDLL(str(build.build(build.cache_folder()))), (ctypes.c_int * 3)(), {}
    calls.declared(library)
    while name := library.lab_kind(len(sizes), facts):
        sizes[name.decode()] = tuple(facts)
    for codec in GGUF_CODECS.values():
        weights, nbytes, multiple = sizes[codec.kind.name]
        assert (weights // multiple * codec.kind.block, nbytes * codec.kind.block // weights, multiple) == (weights, codec.kind.nbytes, codec.kind.block)


@needs_compiler
def test_threads_come_from_one_openmp_runtime() -> None:
    """A second copy would start a second pool of threads, which wait for work on the same cores."""
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "gomp" in line or "libomp" in line or "iomp" in line}
    assert len(loaded) <= 1


def branches() -> list[tuple[str, ...]]:
    """Flags of the branches to try: plain C++ anywhere; AVX2 and AVX-512 where this CPU has them."""
    features = build._cpu().split()
    found: list[tuple[str, ...]] = [("-DLAB_PLAIN",)]
    if {"avx2", "fma", "f16c"} <= set(features):
        found.append(("-mavx2", "-mfma", "-mf16c"))
    if {"avx512f", "avx512bw", "avx512vl", "f16c"} <= set(features):
        found.append(("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl"))
    return found


@needs_compiler
@pytest.mark.parametrize("flags", branches(), ids=lambda flags: flags[-1])
def test_every_branch_of_the_source_decodes_and_multiplies_alike(flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    library = calls.declared(ctypes.CDLL(str(build.build(build.cache_folder(), extra=(*flags, "-O1"), tuned=((),)))))
    monkeypatch.setattr(calls, "_library", lambda: library)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # two that wait for each other are slow where other work has the cores
    cases = [(name, {PART: torch.from_numpy(packed_rows(name.removeprefix("gguf:")))}, 2 * codec.kind.block) for name, codec in GGUF_CODECS.items()]
    cases = [case for case in cases if TYPES[case[0].removeprefix("gguf:")].block > 1]
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    cases += [("gguf:F16", {PART: halves.view(torch.uint8).view(128, -1)}, 512), ("bf16", {"weight": halves.view(torch.bfloat16).view(128, -1)}, 512)]
    for name in ("int8_g128", "w3_levels", "q2_g32", "q2_levels"):
        parts = create(name).encode(torch.randn(37, 640))
        cases.append((name, parts, 640))
    scales = {
        "codes": torch.randint(256, (256, 24), dtype=torch.uint8),
        "scale": torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)[:, None],
        "factor": torch.ones(1),
    }
    cases.append(("w3_levels", scales, 64))  # every E4M3 value
    for name, parts, cols in cases:
        expected = create(name).decode(parts, cols)
        found = native.decode(name, parts, cols)
        numbers = ~expected.isnan()
        assert torch.equal(found.isnan(), expected.isnan()), name
        assert torch.equal(found[numbers].view(torch.int32), expected[numbers].view(torch.int32)), name
        moderate = (numbers & (expected.abs() < 1e9)).all(1)
        x = torch.randn(3, cols)
        exact, product = x.double() @ expected[moderate].double().T, native.product(name, parts, x)[:, moderate]
        assert float((product.double() - exact).norm()) < 1e-5 * float(x.norm() * expected[moderate].double().norm()), name
