"""Trains nano: `python -m experiments.nano_training.train --corpus .cache/nano_corpus --out experiments/nano`.

Every step draws one of the trained depths and runs that prefix of the layers, so that `layers=3`, `6` and all twelve end in a model that was
trained to end there. Data order, initialisation and dropout depend only on seed and step, so an interrupted run continues from its last
checkpoint (`--resume`) as if it had not stopped, up to the GPU's rounding. It proves nothing about larger models.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy

from experiments.nano_training.auxiliary import AuxiliaryLosses
from experiments.nano_training.nano_config import CONTEXT, TRAINED_DEPTHS, config_json
from experiments.nano_training.parameters import ParameterBinder, checkpoint_tensors
from lab.models.qwen4_exp.config import from_dict
from lab.models.qwen4_exp.model import Qwen4Exp

DEPTH_SHARES = (0.2, 0.25, 0.55)
"""How often each trained depth is drawn; the full depth learns slowest and gets most."""


def batch_at(data: Tensor, step: int, batch: int, seed: int) -> Tensor:
    """The training windows of a step, int64 [batch, CONTEXT + 1]; depends only on seed and step."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(0, len(data) - CONTEXT - 1, (batch,), generator=generator).to(data.device)
    return data[starts[:, None] + torch.arange(CONTEXT + 1, device=data.device)].long()


def depth_at(step: int, seed: int) -> int:
    """The prefix length trained in a step."""
    generator = torch.Generator().manual_seed(seed * 7_000_003 + step)
    return TRAINED_DEPTHS[int(torch.multinomial(torch.tensor(DEPTH_SHARES), 1, generator=generator))]


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 2 % of the steps, then cosine to 2 % of the peak."""
    warm = max(1, steps // 50)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))))


@torch.no_grad()
def heldout_loss(model: Qwen4Exp, data: Tensor, windows: int, batch: int) -> dict[int, float]:
    """Mean next-token loss in nat at each trained depth, over `windows` evenly spaced windows."""
    starts = torch.linspace(0, len(data) - CONTEXT - 2, windows, device=data.device).long()
    rows = data[starts[:, None] + torch.arange(CONTEXT + 1, device=data.device)].long()
    losses = {}
    for depth in TRAINED_DEPTHS:
        parts = [cross_entropy(model.head(model.hidden(r[:, :-1], depth=depth)).flatten(0, 1), r[:, 1:].flatten()) for r in rows.split(batch)]
        losses[depth] = float(torch.stack(parts).mean())
    return losses


def optimiser(binder: ParameterBinder) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only (not on norms, decays, taps, embedding or n-gram rows)."""
    decayed: list[torch.nn.Parameter] = []
    plain: list[torch.nn.Parameter] = []
    for name, parameter in binder.parameters.items():
        matrix = parameter.ndim >= 2 and "conv1d" not in name and "embed" not in name
        (decayed if matrix else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=binder.device.type == "cuda")


def train(args: argparse.Namespace) -> None:
    """Runs or resumes the training and writes checkpoint, log and, at the end, the released files."""
    torch.set_float32_matmul_precision("high")  # TF32: the states and norms stay float32, products lose ~3 digits, training only
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = {k: torch.from_numpy(np.load(args.corpus / f"{k}.u16.npy").astype(np.int32)).to(device) for k in ("train", "heldout")}
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    eos = tokenizer.token_to_id("<|endoftext|>")
    if eos is None:
        raise SystemExit(f"{args.out / 'tokenizer.json'} has no <|endoftext|>; run experiments.nano_training.tokenizer first")
    config = from_dict(config_json(tokenizer.get_vocab_size(), eos))
    binder = ParameterBinder(device, args.seed)
    binder.dropout = args.dropout
    model = Qwen4Exp(config, binder)
    optim = optimiser(binder)
    auxiliary = AuxiliaryLosses(model)
    log: list[dict[str, object]] = []
    first, spent = 0, 0.0
    settings = {k: getattr(args, k) for k in ("steps", "batch", "lr", "dropout", "dense_share", "seed")}
    state_file = args.work / "nano_training_state.pt"
    if args.resume and state_file.exists():
        saved = torch.load(state_file, map_location=device, weights_only=True)
        if saved["settings"] != json.dumps(settings):
            raise SystemExit(f"{state_file} is of a run with other settings ({saved['settings']}); remove it or repeat those")
        for name, value in saved["parameters"].items():
            binder.parameters[name].data.copy_(value)
        optim.load_state_dict(saved["optimiser"])
        first, log, spent = saved["step"], json.loads(saved["log"]), saved["seconds"]
        print(f"resumed at step {first}", flush=True)
    started = time.monotonic()
    for step in range(first, args.steps):
        auxiliary.dense = step < args.steps * args.dense_share
        for group in optim.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        rows, depth = batch_at(data["train"], step, args.batch, args.seed), depth_at(step, args.seed)
        torch.manual_seed(args.seed * 13_000_003 + step)
        binder.training = True
        loss = cross_entropy(model.head(model.hidden(rows[:, :-1], depth=depth)).flatten(0, 1), rows[:, 1:].flatten())
        balance, indexer = auxiliary.collect()
        (loss + 0.01 * balance + 0.1 * indexer.to(device)).backward()
        torch.nn.utils.clip_grad_norm_(list(binder.parameters.values()), 1.0)
        optim.step()
        optim.zero_grad(set_to_none=True)
        binder.training = False
        last = step + 1 == args.steps
        if step % 20 == 0 and not torch.isfinite(loss):
            raise SystemExit(f"loss is {loss.item()} at step {step}")
        if (step + 1) % args.log_every == 0 or last:
            held = heldout_loss(model, data["heldout"], 256 if last else 64, args.batch)
            auxiliary.collect()
            entry: dict[str, object] = {
                "step": step + 1,
                "depth": depth,
                "train_loss": round(float(loss.detach()), 4),
                "balance": round(float(balance.detach()), 4),
                "indexer": round(float(indexer.detach()), 4),
                "heldout_loss": {str(d): round(v, 4) for d, v in held.items()},
                "elapsed_s": round(time.monotonic() - started, 1),
            }
            log.append(entry)
            print(json.dumps(entry), flush=True)
        if (step + 1) % args.save_every == 0 and not last:
            progress = {"step": step + 1, "log": json.dumps(log), "settings": json.dumps(settings), "seconds": spent + time.monotonic() - started}
            save_state(state_file, progress, binder, optim)
    released = args.out
    released.mkdir(parents=True, exist_ok=True)
    save_file(checkpoint_tensors(binder, config.ngram_shards), released / "model.safetensors", metadata={"format": "pt"})
    (released / "config.json").write_text(json.dumps(config_json(config.vocab_size, config.eos_token_id), indent=1) + "\n")
    machine = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "cpu"
    summary = {
        "settings": settings,
        "context": CONTEXT,
        "tokens_seen": args.steps * args.batch * CONTEXT,
        "train_tokens": len(data["train"]),
        "device": machine,
        "torch": torch.__version__,
        "minutes": round((spent + time.monotonic() - started) / 60, 2),
        "log": log,
    }
    (released / "training_log.json").write_text(json.dumps(summary, indent=1) + "\n")
    state_file.unlink(missing_ok=True)  # finished: the next call trains anew


def save_state(path: Path, progress: dict[str, object], binder: ParameterBinder, optim: torch.optim.Optimizer) -> None:
    """Writes the resumable state beside and renames it, so that a kill leaves the previous one whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parameters = {name: p.detach() for name, p in binder.parameters.items()}
    partial = path.with_suffix(".part")
    torch.save({**progress, "parameters": parameters, "optimiser": optim.state_dict()}, partial)
    partial.replace(path)


def main() -> None:
    """Command line; the defaults are those of the released nano."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path(".cache/nano_corpus"), help="folder with train.u16.npy and heldout.u16.npy")
    parser.add_argument("--out", type=Path, default=Path("experiments/nano"), help="where tokenizer.json is and the released files go")
    parser.add_argument("--work", type=Path, default=Path(".cache/nano_corpus"), help="where the resumable state goes")
    parser.add_argument("--steps", type=int, default=2200)
    parser.add_argument("--batch", type=int, default=64, help="sequences per step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--dense-share", type=float, default=0.6, help="share of the steps with dense attention while the indexer learns")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=500)
    parser.add_argument("--resume", action="store_true")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
