"""Opens mutated VQF files: `python -m experiments.vqf_fuzz --count 200000`. Each must open with every tensor inside it, or be refused in one line.

Why besides the tests: a few thousand mutations run with every test, and a format reader is worth some hundred thousand. Mutation number N is always the
same, so a failure names a number: `--start N --count 1`. The address space is limited and Python's allocations are watched, so that a size that lies
cannot ask for memory unseen.
What it does not prove: that values are right; mutations of weights are not refused, since any bytes are weights.
"""

from __future__ import annotations

import argparse
import random
import resource
import struct
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lab.artifacts.vqf_arch import fields_of_arch
from lab.artifacts.vqf_file import VqfFile
from lab.artifacts.vqf_flags import Engine, check_layout
from lab.artifacts.vqf_header import Arch
from lab.artifacts.vqf_plan import WMODES, flags_of, selection
from lab.artifacts.vqf_sink import writing
from lab.artifacts.vqf_weights import VqfWeights
from lab.errors import LabError

MOST_BYTES = 4 << 20
"""Peak of Python's allocations while one file is opened and looked at. The checksum's pieces of 64 KiB take 1.3 MB of it, whatever the file says."""

_ROOM_BYTES = 1 << 30  # of address space beyond what the process has when it starts
_NUMBERS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 31, 32, 63, 64, 65, 96, 184, 200, 255, 256, 432, 448, 1024, 4096, 2**16, 2**31 - 1, 2**31, 2**32 - 1]
_LONGS = [*_NUMBERS, 2**32, 2**60, 2**63 - 64, 2**63, 2**64 - 64, 2**64 - 1]


@dataclass
class Outcome:
    """Counts of a run; `reasons` by the first words of the refusal, `peak` in bytes."""

    opened: int = 0
    refused: int = 0
    peak: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


def mutated(content: bytes, chance: random.Random) -> bytes:
    """One to three changes to header or directory: bits, bytes, words of C's alignment, pieces cut out, put in or copied, the end cut off or grown."""
    out = bytearray(content)
    count = struct.unpack_from("<I", content, 12)[0]
    reach = 448 + 64 * count
    for _ in range(chance.randint(1, 3)):
        at, kind = chance.randrange(min(reach, len(out) - 8)), chance.randrange(10)
        if kind == 0:
            out[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            out[at] = chance.randrange(256)
        elif kind == 2:
            struct.pack_into("<Q", out, at & ~7, chance.choice(_LONGS))
        elif kind == 3:
            struct.pack_into("<I", out, at & ~3, chance.choice(_NUMBERS))
        elif kind == 4:
            word = struct.unpack_from("<I", out, at & ~3)[0]
            struct.pack_into("<I", out, at & ~3, (word + chance.choice((-64, -8, -1, 1, 8, 64))) & 0xFFFFFFFF)
        elif kind in (5, 6):
            length, end = chance.randint(1, 64), len(out)
            if kind == 5:
                del out[at : at + length]
                out[reach - length : reach - length] = bytes(length)
            else:
                out[at:at] = chance.randbytes(length)
                del out[reach : reach + length]
            if chance.random() < 0.2:  # elsewhere the length stays, or its check would catch them all
                del out[end - length :]
        elif kind == 7:
            source, length = chance.randrange(reach), chance.choice((4, 8, 16, 64))
            out[at : at + length] = content[source : source + length]
        elif kind == 8:
            a, b = (448 + 64 * chance.randrange(count) for _ in range(2))
            out[a : a + 64], out[b : b + 64] = out[b : b + 64], out[a : a + 64]
        elif chance.random() < 0.2:
            del out[chance.randint(16, len(out)) :]
        elif chance.random() < 0.2:
            out += chance.randbytes(chance.choice((1, 8, 24, 64)))
        else:
            struct.pack_into("<I", out, 4 * chance.randrange(49), chance.choice(_NUMBERS))  # one of the model's numbers
        if len(out) < 1024:
            break
    return bytes(out)


def look_at(path: Path, size: int) -> None:
    """Opens the file and asks for everything it offers. Raises LabError for a refusal, AssertionError where something lies outside the file."""
    file = VqfFile(path)
    for name, entry in file.entries.items():
        assert entry.offset + entry.nbytes <= size and file.raw(name).nbytes == entry.nbytes, name
    fields_of_arch(path, file.header.arch, {"norm_topk_prob": True})
    for use in file.sets:
        weights = VqfWeights(file, use)
        _everything(VqfWeights(file, use, "4x4") if weights.ambiguous else weights)
    file.check_sum()
    check_layout(path, file.header.flags, Engine())


def _everything(weights: VqfWeights) -> None:
    arch = weights.file.header.arch
    last = f"layers.{arch.n_layers - 1}"
    stored = [*weights.matrix("lm_head.weight"), *weights.matrix("embed_tokens.weight")]
    stored += weights.matrix(f"{last}.self_attn.o_proj.weight")
    weights.vector(f"{last}.input_layernorm.weight")
    if weights.mixture:
        tall, wide = weights.experts(f"{last}.mlp.experts", arch.n_experts)
        stored += [*tall, *wide]
    else:
        stored += weights.matrix(f"{last}.mlp.down_proj.weight")
    for one in stored:
        values = one.codec.decode(one.parts, one.shape[-1])
        assert tuple(values.shape) == one.shape
    weights.check_blocks()


def fuzz(bases: Sequence[bytes], folder: Path, start: int, count: int) -> Outcome:
    """Mutations `start` to `start + count` of `bases`. Raises AssertionError naming the mutation that did anything but open soundly or say one line."""
    path, outcome = folder / "m.vqf", Outcome()
    tracemalloc.start()
    try:
        for number in range(start, start + count):
            chance = random.Random(number)
            content = mutated(chance.choice(bases), chance)
            path.write_bytes(content)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                look_at(path, len(content))
                outcome.opened += 1
            except LabError as error:
                line = str(error)
                assert len(line.splitlines()) == 1 and line.startswith(f"{path}: ") and len(line) < len(str(path)) + 600, f"mutation {number}: {line!r}"
                outcome.refused += 1
                outcome.reasons[_kind(line.removeprefix(f"{path}: "))] += 1
            except Exception as error:
                raise AssertionError(f"mutation {number}: {type(error).__name__}: {error}") from error
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak < MOST_BYTES, f"mutation {number}: {peak} bytes allocated"
            outcome.peak = max(outcome.peak, peak)
    finally:
        tracemalloc.stop()
    return outcome


def _kind(line: str) -> str:
    """The words of a refusal without names and numbers."""
    words = [word for word in line.split() if not any(c.isdigit() for c in word) and "'" not in word]
    return " ".join(words[:7])


def limit_memory() -> None:
    """No allocation of more than a gigabyte from here on, by whatever library."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + _ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def small_files(folder: Path) -> list[bytes]:
    """Valid files of every kind, of random bytes: dense in each mode, a mixture, with a vision tower, and in the older header."""
    dense = Arch(32, 2, 1, 1, 32, 64, 16, 64, 1e4, 1e-6)
    mixture = Arch(32, 1, 2, 1, 32, 64, 8, 64, 1e4, 1e-6, n_experts=2, moe_ffn=32, top_k=1)
    tower = Arch(32, 1, 1, 1, 32, 32, 8, 64, 1e4, 1e-6, has_vision=1, vis_depth=1, vis_hidden=32, vis_ffn=8, vis_patch=1, vis_merge=1, vis_out_dim=4)
    wanted = [(dense, wmode, None) for wmode in WMODES] + [(dense, "dual", 0), (mixture, "q4", None), (mixture, "dual", None), (tower, "q4", None)]
    found = []
    chance = random.Random(7)
    for arch, wmode, layout in wanted:
        flags = flags_of(wmode, layout, bool(arch.n_experts), bool(arch.has_vision))
        tensors = [planned for planned in selection(arch, flags, WMODES[wmode][0]) if planned.nbytes]
        path = folder / "base.vqf"
        with writing(path, arch, flags, tensors, force=True) as sink:
            for planned in tensors:
                sink.put(planned.name, 0, np.frombuffer(chance.randbytes(planned.nbytes), np.uint8))
        found.append(path.read_bytes())
    older = bytearray(found[0])
    older[184:200], older[200:216] = older[200:216], bytes(16)
    return [*found, bytes(older)]


def main() -> None:
    """Parses the command line and prints what happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--start", type=int, default=0)
    arguments = parser.parse_args()
    shared = Path("/dev/shm")  # files are rewritten for every mutation
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        bases = small_files(Path(folder))
        for base in bases:
            (Path(folder) / "base.vqf").write_bytes(base)
            VqfFile(Path(folder) / "base.vqf").check_sum()
        limit_memory()
        begun = time.perf_counter()
        outcome = fuzz(bases, Path(folder), arguments.start, arguments.count)
        seconds = time.perf_counter() - begun
    print(f"{arguments.count} mutations of {len(bases)} files in {seconds:.0f} s ({arguments.count / seconds:.0f}/s)")
    print(f"opened {outcome.opened}, refused {outcome.refused}, most memory for one {outcome.peak} bytes")
    for reason, times in outcome.reasons.most_common(40):
        print(f"{times:8d}  {reason}")


if __name__ == "__main__":
    main()
