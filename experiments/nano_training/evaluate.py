"""Held-out perplexity and bits per byte of the released nano at every trained depth, over the whole shipped text, for the model card.

`python -m experiments.nano_training.evaluate --device cpu` writes evaluation.json beside the weights. It uses the lab's own engine and protocol
(`ppl/window@1`, context 512, stride 256) on the released bf16 weights; the tokens are those of the 5-gram baseline but for each end of the text.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from experiments.nano_training.nano_config import CONTEXT, TRAINED_DEPTHS
from lab.artifacts import load_tokenizer
from lab.cell import BenchSpec, Cell, DeviceSpec, ModelSpec, PathSpec
from lab.engines.local import LocalEngine
from lab.measure.perplexity import PerplexityTally
from lab.measure.reference import SOURCE_PLAN
from lab.measure.scoring import score_windows
from lab.measure.text import load_corpus

ROOT = Path(__file__).parents[2]
STRIDE = CONTEXT // 2


def reference_cell(depth: int, device: str, dtype: str) -> Cell:
    """The source-precision cell of nano at `depth` on a torch device."""
    return Cell(
        model=ModelSpec(name="nano", arch="qwen4_exp", artifact="experiments/nano", corpus="experiments/nano/heldout.txt"),
        path=PathSpec(name="reference", title="", components=SOURCE_PLAN, reference=True),
        layers=depth,
        device=DeviceSpec.model_validate({"name": device, "torch_device": device, "compute_dtype": dtype}),
        bench=BenchSpec(name="card", ppl_context=CONTEXT, ppl_stride=STRIDE, ppl_windows=10**6, warmup=1, repeats=5, timeout_s=3600),
    )


def evaluate(device: str, dtype: str, batch: int) -> dict[str, object]:
    """{depths: {depth: {ppl, ppl_stderr, bits_per_byte, scored_tokens}}, device, dtype, torch, corpus}."""
    depths: dict[str, object] = {}
    corpus = load_corpus(load_tokenizer(ROOT / "experiments/nano"), ROOT / "experiments/nano/heldout.txt")
    for depth in TRAINED_DEPTHS:
        cell = reference_cell(depth, device, dtype)
        engine = LocalEngine(cell, ROOT)
        windows, scored = corpus.windows(cell.bench.ppl_context, cell.bench.ppl_stride, cell.bench.ppl_windows)
        tally = PerplexityTally(corpus.token_bytes)
        for log_p, targets, window in score_windows(engine.scores, windows, scored, batch):
            tally.add(log_p, targets, window)
        found = tally.metrics({})
        depths[str(depth)] = {
            "ppl": found["ppl"].value,
            "ppl_stderr": found["ppl"].stderr,
            "bits_per_byte": found["bits_per_byte"].value,
            "scored_tokens": found["ppl"].details["scored_tokens"],
        }
        print(depth, json.dumps(depths[str(depth)]), flush=True)
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {
        "depths": depths,
        "protocol": f"ppl/window@1, context {CONTEXT}, stride {STRIDE}",
        "device": name,
        "compute_dtype": dtype,
        "torch": torch.__version__,
        "corpus": corpus.facts,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--out", type=Path, default=ROOT / "experiments/nano/evaluation.json")
    args = parser.parse_args()
    args.out.write_text(json.dumps(evaluate(args.device, args.dtype, args.batch), indent=1) + "\n")


if __name__ == "__main__":
    main()
