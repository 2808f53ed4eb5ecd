"""Measures qwen3_small's held-out perplexity and writes its card: `python -m experiments.qwen3_training.card`.

The perplexity is the lab's own (`ppl/window@1`) with the windows of the standard bench, on the released bf16 weights with float32 arithmetic on a CPU.
No number is typed into the card: what is missing makes the script fail rather than leave a hole.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from lab.artifacts import load_tokenizer
from lab.cell import BenchSpec, Cell, DeviceSpec, ModelSpec, PathSpec
from lab.engines.local import LocalEngine
from lab.measure.perplexity import PerplexityTally
from lab.measure.reference import BATCH, SOURCE_PLAN
from lab.measure.scoring import score_windows
from lab.measure.text import load_corpus

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments" / "qwen3_small"
_CONTEXT, _STRIDE, _WINDOWS = 512, 256, 40
"""As in conf/bench/standard.yaml."""


def evaluate() -> dict[str, Any]:
    """{ppl, ppl_stderr, bits_per_byte, scored_tokens, windows, protocol, torch, date, corpus}."""
    config = json.loads((FOLDER / "config.json").read_text())
    cell = Cell(
        model=ModelSpec(name="qwen3_small", arch="qwen3", artifact="experiments/qwen3_small", corpus="experiments/nano/heldout.txt"),
        path=PathSpec(name="reference", title="", components=SOURCE_PLAN, reference=True),
        layers=config["num_hidden_layers"],
        device=DeviceSpec(name="cpu", torch_device="cpu", compute_dtype="float32"),
        bench=BenchSpec(name="card", ppl_context=_CONTEXT, ppl_stride=_STRIDE, ppl_windows=_WINDOWS, warmup=1, repeats=5, timeout_s=3600),
    )
    corpus = load_corpus(load_tokenizer(FOLDER), ROOT / cell.model.corpus)
    engine, tally = LocalEngine(cell, ROOT), PerplexityTally(corpus.token_bytes)
    for log_p, targets, window in score_windows(engine.scores, *corpus.windows(_CONTEXT, _STRIDE, _WINDOWS), BATCH):
        tally.add(log_p, targets, window)
    found = tally.metrics({})
    return {
        "ppl": found["ppl"].value,
        "ppl_stderr": found["ppl"].stderr,
        "bits_per_byte": found["bits_per_byte"].value,
        "scored_tokens": found["ppl"].details["scored_tokens"],
        "windows": found["ppl"].details["windows"],
        "protocol": f"ppl/window@1, context {_CONTEXT}, stride {_STRIDE}",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "corpus": corpus.facts,
    }


def card(config: dict[str, Any], training: dict[str, Any], evaluation: dict[str, Any]) -> str:
    """The card's Markdown."""
    settings, size = training["settings"], training["parameters"]
    curve = "\n".join(f"| {entry['step']} | {entry['train_loss']} | {entry['heldout_loss']} |" for entry in training["log"])
    return f"""# qwen3_small

A dense language model of Qwen3's shape - grouped queries, a norm on every head's queries and keys, gated MLP, untied head - with {size / 1e6:.2f} million
weights: {config["num_hidden_layers"]} layers, hidden size {config["hidden_size"]}, {config["num_attention_heads"]} heads over
{config["num_key_value_heads"]} key heads of {config["head_dim"]}, MLP width {config["intermediate_size"]}, vocabulary {config["vocab_size"]} (nano's
tokenizer). bf16, Hugging Face layout, `Qwen3ForCausalLM` of transformers. It exists so that everything the Kestrel stage needs - VQF files, strip
caches, the device against the CPU - can be run on any machine in minutes with weights that mean something. **Its numbers are its own; they do not
predict an 8B model's.** It is too small to be useful as a language model.

## Quality

Held-out text `experiments/nano/heldout.txt`, {evaluation["protocol"]}, the first {evaluation["windows"]} windows ({evaluation["scored_tokens"]} scored
tokens), float32 arithmetic on a CPU, torch {evaluation["torch"]}, {evaluation["date"]}: **perplexity {evaluation["ppl"]:.2f} ±
{evaluation["ppl_stderr"]:.2f} per token, {evaluation["bits_per_byte"]:.3f} bits per byte.** The same number from the lab:

```
python -m lab run model=qwen3_small path=reference device=cpu bench=standard
```

It was trained with all {config["num_hidden_layers"]} layers only; with fewer it loads and runs, but its perplexity means nothing.

## Data

nano's: the same training works and held-out works under the same tokenizer; sources, licences and what the split does not prove are in
[nano's card](../nano/README.md). The held-out works were not trained on.

## Training

transformers {training["transformers"]}, {settings["steps"]} steps of {settings["batch"] * training["context"]} tokens
({training["tokens_seen"] / 1e6:.0f} M tokens, {training["tokens_seen"] / training["train_tokens"]:.1f} passes over {training["train_tokens"] / 1e6:.2f} M)
in {training["minutes"]} minutes on one {training["device"]}, torch {training["torch"]}, bfloat16 autocast over float32 weights, AdamW, peak learning rate
{settings["lr"]}, dropout {settings["dropout"]} on what each block adds, seed {settings["seed"]}. Losses in nat per token; held-out over 64 windows of the
whole held-out works, 256 in the last row (so the last two rows do not compare exactly):

| step | training loss of that step | held-out loss |
|---|---|---|
{curve}

```
python -m experiments.nano_training.corpus --out .cache/nano_corpus   # downloads and splits the texts
python -m experiments.qwen3_training.train                            # writes the files here; meant for a GPU
python -m experiments.qwen3_training.card                             # measures and writes this card
```

A repeated training sees the same data in the same order; its weights agree up to a GPU's rounding, not bit for bit.

## Licence

Weights: Apache-2.0, as this repository. Texts: as nano's card lists them.
"""


def main() -> None:
    """Writes evaluation.json and README.md beside the weights."""
    evaluation = evaluate()
    (FOLDER / "evaluation.json").write_text(json.dumps(evaluation, indent=1) + "\n")
    config, training = (json.loads((FOLDER / f"{name}.json").read_text()) for name in ("config", "training_log"))
    (FOLDER / "README.md").write_text(card(config, training, evaluation), encoding="utf-8")


if __name__ == "__main__":
    main()
