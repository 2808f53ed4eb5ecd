"""Writes nano's model card from the files that training, evaluation and the baseline left: `python -m experiments.nano_training.card`.

No number is typed into the card; what is missing makes the script fail rather than leave a hole.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.nano_training.nano_config import CONTEXT, TRAINED_DEPTHS

FOLDER = Path(__file__).parents[1] / "nano"


def _load(name: str) -> Any:
    return json.loads((FOLDER / name).read_text())


def _curve(log: list[dict[str, Any]]) -> str:
    rows = [f"| {e['step']} | {e['depth']} | {e['train_loss']} | " + " | ".join(str(e["heldout_loss"][str(d)]) for d in TRAINED_DEPTHS) + " |" for e in log]
    head = "| step | depth trained in that step | its training loss | " + " | ".join(f"held-out, {d} layers" for d in TRAINED_DEPTHS) + " |"
    return "\n".join([head, "|" + "---|" * (3 + len(TRAINED_DEPTHS)), *rows])


def card() -> str:
    """The card's Markdown."""
    config, training, evaluation, baseline = (_load(f"{n}.json") for n in ("config", "training_log", "evaluation", "ngram_baseline"))
    sources = _load("sources.json")
    if baseline["train_tokens"] != training["train_tokens"]:
        raise SystemExit(f"the 5-gram saw {baseline['train_tokens']} tokens, nano {training['train_tokens']}: run ngram_baseline on the same corpus")
    settings, five = training["settings"], baseline["orders"]["5"]
    quality = "\n".join(
        f"| nano, {depth} layers | {found['ppl']:.2f} ± {found['ppl_stderr']:.2f} | {found['bits_per_byte']:.3f} |"
        for depth, found in evaluation["depths"].items()
    )
    data = "\n".join(
        f"| {s['name']} {s['version']} ({s['registry']}) | {s['licence']} | {s['train_bytes'] / 1e6:.2f} | {s['heldout_bytes'] / 1e6:.2f} |" for s in sources
    )
    tokens_per_step = settings["batch"] * CONTEXT
    return f"""# nano

A language model of the `qwen4_exp` architecture with every part present - four-stream hyper-connections, Gated DeltaNet, sparse attention with an
indexer, {config["num_experts"]} routed experts and a shared one per layer, hashed n-gram table - at {config["num_hidden_layers"]} layers and hidden size
{config["hidden_size"]}, in bf16 and the Hugging Face layout (`Qwen4ExpForCausalLM`, transformers >= 5.24). It exists so that every migration path can be
run, and its quality measured, on any machine in minutes. **Its numbers are nano's; they are not Qwen3.8-Flash-Next's and do not predict them.**
It is too small to be useful as a language model.

## Quality

Held-out text `heldout.txt` ({evaluation["corpus"]["tokens"]} tokens), {evaluation["protocol"]}; bf16 weights, {evaluation["compute_dtype"]} arithmetic on
{evaluation["device"]}, {evaluation["date"]}. The 5-gram model ({baseline["model"]}, back-off to lower orders) was trained on the same text and scores the
same tokens. All share one tokenizer, so perplexities per token compare.

| model | perplexity per token | bits per byte |
|---|---|---|
{quality}
| 5-gram with back-off | {five["ppl"]:.2f} | {five["bits_per_byte"]:.3f} |

Only depths {", ".join(map(str, TRAINED_DEPTHS))} were trained to end there; other depths load and run, but their perplexity means nothing.

## Data

| source | licence | training MB | held-out MB |
|---|---|---|---|
{data}

Split by work (English) and by source file (Chinese); held-out: *Persuasion*, *Twelfth Night*, *Macbeth*, *Ruth*, *Ecclesiastes*, two files of Tang poems,
one of Song ci. Training poems that share a line of ten or more characters with held-out ones were removed. `heldout.txt` holds excerpts of the held-out
works. `sources.json` has versions and digests. Some verbatim lines remain in both (refrains, titles, quotations).

## Training

{settings["steps"]} steps of {tokens_per_step} tokens ({training["tokens_seen"] / 1e6:.0f} M tokens, {training["tokens_seen"] / training["train_tokens"]:.1f}
passes over {training["train_tokens"] / 1e6:.2f} M) in {training["minutes"]} minutes on one {training["device"]}, torch {training["torch"]}, AdamW, peak
learning rate {settings["lr"]}, dropout {settings["dropout"]}, seed {settings["seed"]}. Each step trains one prefix of the layers, drawn from
{", ".join(map(str, TRAINED_DEPTHS))}. Attention is dense for the first {settings["dense_share"]:.0%} of the steps while the indexer learns to predict it,
sparse afterwards. Losses in nat per token over 64
windows of the whole held-out works (not only the excerpts shipped), 256 windows in the last row:

{_curve(training["log"])}

```
make nano        # downloads the texts, trains the tokenizer and the model, evaluates, writes this card; an interrupted training continues
```

A repeated training sees the same data in the same order; on a GPU its weights agree up to rounding, not bit for bit.

## Licence

Weights: Apache-2.0, as this repository. Texts: as listed above.
"""


def main() -> None:
    """Writes README.md beside the weights."""
    (FOLDER / "README.md").write_text(card(), encoding="utf-8")


if __name__ == "__main__":
    main()
