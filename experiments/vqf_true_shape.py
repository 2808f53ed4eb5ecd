"""Writes a VQF file of a model's true shape (36 layers of width 4096 for qwen3_8b) from made-up weights, lays it out anew, and prints memory and speed.

Why: the claim that conversion holds about one layer at a time has to be seen at the size that does not fit otherwise. Weights are drawn tensor by tensor and
encoded by the real writer at layout 0x1; then the real converter moves the file to 0x3, as the 8B stage of Kestrel needs it. The files are deleted.
What it does not prove: anything about a real checkpoint's values, or that Kestrel loads the file.

    python -m experiments.vqf_true_shape                 # 36 layers; needs 12 GB of disk and some minutes
    python -m experiments.vqf_true_shape --layers 2
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lab.artifacts.inspection import load_tokenizer
from lab.artifacts.synthetic import SyntheticWeights
from lab.artifacts.vqf import VqfArtifact
from lab.artifacts.vqf_file import VqfFile
from lab.artifacts.vqf_relayout import relayout
from lab.artifacts.vqf_writer import write_vqf
from lab.codecs import create
from lab.models.transformer.config import from_dict
from lab.project import find_project

_POLL_S = 0.01


@contextmanager
def peak_memory() -> Iterator[Callable[[], tuple[int, int]]]:
    """(most private memory, most resident memory) in bytes since it was entered. Private: RssAnon + RssShmem, asked every 10 ms. Resident: VmHWM, kept by the
    system and set back here where it lets itself be: it also counts pages of mapped files, which the system may take back at any time."""
    most, over = 0, threading.Event()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak starts again from now

    def watch() -> None:
        nonlocal most
        while not over.wait(_POLL_S):
            most = max(most, _status("RssAnon") + _status("RssShmem"))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: (most, _status("VmHWM"))
    finally:
        over.set()
        thread.join()


def _status(field: str) -> int:
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))


def main() -> None:
    """Runs it and prints one line for each of the two conversions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="qwen3_8b", help="a file in conf/geometry (qwen3_8b)")
    parser.add_argument("--layers", type=int, help="the first N layers only")
    parser.add_argument("--wmode", default="q4", choices=("q4", "q8", "dual"))
    parser.add_argument("--folder", type=Path, help="where the files are written and deleted (the system's temporary folder)")
    asked = parser.parse_args()
    root = find_project().root
    data = json.loads((root / "conf" / "geometry" / f"{asked.geometry}.json").read_text(encoding="utf-8"))
    config = from_dict(data, asked.geometry)
    config = config.truncated(asked.layers or config.num_layers)
    tokenizer = load_tokenizer(root / "experiments" / "nano")
    bf16 = create("bf16")
    weights = SyntheticWeights(config, {name: bf16 for name in ("trunk", "head", "experts")}, torch.device("cpu"), frozenset(), asked.geometry)
    print(f"{asked.geometry}: {config.num_layers} layers of width {config.hidden_size}, {torch.get_num_threads()} threads", flush=True)
    with tempfile.TemporaryDirectory(dir=asked.folder) as place:
        old, new = Path(place) / "old.vqf", Path(place) / "new.vqf"
        started, worked = time.perf_counter(), time.process_time()
        with peak_memory() as peak:
            written = write_vqf(weights, config, tokenizer, old, asked.wmode, layout=0x1)
        count = sum(each.weights for each in written.sums.values())
        _say(
            "written",
            written.nbytes,
            time.perf_counter() - started,
            time.process_time() - worked,
            peak(),
            f", {count / 1e9:.2f} G weights encoded and compared",
        )
        started, worked = time.perf_counter(), time.process_time()
        with peak_memory() as peak:
            moved = relayout(VqfFile(old), new, 0x3)
        _say(
            f"laid out {moved.from_layout:#x} -> {moved.to_layout:#x}",
            moved.nbytes,
            time.perf_counter() - started,
            time.process_time() - worked,
            peak(),
            ", compared",
        )
        opened = VqfArtifact(new).config()  # through the gate
        print(f"opens as {opened.num_layers} layers")


def _say(what: str, nbytes: int, seconds: float, worked_s: float, peak: tuple[int, int], more: str) -> None:
    memory = f"peak private memory {peak[0] / 1e9:.2f} GB, peak resident memory with mapped files {peak[1] / 1e9:.2f} GB"
    speed = f"{nbytes / 1e9:.2f} GB in {seconds:.1f} s, {nbytes / seconds / 1e6:.0f} MB/s, {worked_s:.0f} s of processor time"
    print(f"{what}: {speed}{more}; {memory}", flush=True)


if __name__ == "__main__":
    main()
