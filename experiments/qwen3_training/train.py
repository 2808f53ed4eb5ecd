"""Trains qwen3_small: `python -m experiments.qwen3_training.train --out experiments/qwen3_small`.

Plain next-token training of transformers' `Qwen3ForCausalLM` under bfloat16 autocast, on the token ids of nano's training works. Data order, initialisation
and dropout depend only on seed and step. Sizes are chosen for VQF files: vocabulary and widths are multiples of 256, so every layout and every kind of
quantisation fits. It proves nothing about larger models, and a repeated run agrees up to a GPU's rounding, not bit for bit.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments.nano_training.nano_config import CONTEXT
from experiments.nano_training.tokenizer import encode_documents
from experiments.nano_training.train import batch_at, learning_rate

TOKENIZER = Path("experiments/nano/tokenizer.json")


def config_json(vocab_size: int, eos_token_id: int) -> dict[str, Any]:
    """`config.json` of qwen3_small, Hugging Face form: grouped queries, normed heads and an untied head, as the 8B model has them."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 768,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "eos_token_id": eos_token_id,
        "bos_token_id": eos_token_id,
        "initializer_range": 0.02,
    }


def token_ids(corpus: Path, part: str) -> Tensor:
    """Ids of `{part}.jsonl` under nano's tokenizer, int32 [N]; encoded once and kept beside it as uint16."""
    kept = corpus / f"{part}.u16.npy"
    if not kept.exists():
        np.save(kept, np.concatenate(encode_documents(corpus / f"{part}.jsonl", Tokenizer.from_file(str(TOKENIZER)))))
    return torch.from_numpy(np.load(kept).astype(np.int32))


def new_model(config: dict[str, Any], seed: int, dropout: float) -> Any:
    """transformers' model in float32, initialised from `seed`; what each block adds to the residual stream is dropped out while training."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    settings = {key: value for key, value in config.items() if key not in ("architectures", "model_type", "dtype")}
    model = Qwen3ForCausalLM(Qwen3Config(**settings)).float()
    for name, module in model.named_modules():
        if name.endswith(("o_proj", "down_proj")):  # the class itself has no dropout there
            module.register_forward_hook(lambda module, _, out: nn.functional.dropout(out, dropout, module.training))
    return model


def optimiser(model: Any, device: torch.device) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices, not on norms and the embedding."""
    named = list(model.named_parameters())
    decayed = [p for name, p in named if p.ndim >= 2 and "embed" not in name]
    plain = [p for name, p in named if p.ndim < 2 or "embed" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device.type == "cuda")


def loss_of(model: Any, rows: Tensor) -> Tensor:
    """Mean next-token loss in nat of windows int64 [B, CONTEXT + 1]."""
    with torch.autocast(rows.device.type, torch.bfloat16):
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def heldout_loss(model: Any, data: Tensor, windows: int, batch: int) -> float:
    """Mean loss over `windows` evenly spaced windows of the held-out works."""
    starts = torch.linspace(0, len(data) - CONTEXT - 2, windows, device=data.device).long()
    rows = data[starts[:, None] + torch.arange(CONTEXT + 1, device=data.device)].long()
    model.eval()
    found = float(torch.stack([loss_of(model, part) for part in rows.split(batch)]).mean())
    model.train()
    return found


def train(args: argparse.Namespace) -> None:
    """Trains and writes model.safetensors (bf16), config.json, tokenizer.json and training_log.json. Raises SystemExit when the loss is not finite."""
    import transformers

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = {part: token_ids(args.corpus, part).to(device) for part in ("train", "heldout")}
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    eos = tokenizer.token_to_id("<|endoftext|>")
    if eos is None:
        raise SystemExit(f"{TOKENIZER} has no <|endoftext|>; run experiments.nano_training.tokenizer first")
    config = config_json(tokenizer.get_vocab_size(), eos)
    model = new_model(config, args.seed, args.dropout).to(device).train()
    run: Any = torch.compile(model) if args.compile else model
    optim, log, started = optimiser(model, device), [], time.monotonic()
    for step in range(args.steps):
        for group in optim.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        torch.manual_seed(args.seed * 13_000_003 + step)
        loss = loss_of(run, batch_at(data["train"], step, args.batch, args.seed))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad(set_to_none=True)
        last = step + 1 == args.steps
        if last or (step + 1) % args.log_every == 0:
            if not torch.isfinite(loss):
                raise SystemExit(f"loss is {loss.item()} at step {step}")
            held = heldout_loss(model, data["heldout"], 256 if last else 64, args.batch)
            entry = {
                "step": step + 1,
                "train_loss": round(float(loss.detach()), 4),
                "heldout_loss": round(held, 4),
                "elapsed_s": round(time.monotonic() - started, 1),
            }
            log.append(entry)
            print(json.dumps(entry), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, args.out / "model.safetensors", metadata={"format": "pt"})
    (args.out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    shutil.copyfile(TOKENIZER, args.out / "tokenizer.json")
    summary = {
        "settings": {key: getattr(args, key) for key in ("steps", "batch", "lr", "dropout", "seed")},
        "context": CONTEXT,
        "tokens_seen": args.steps * args.batch * CONTEXT,
        "train_tokens": len(data["train"]),
        "parameters": sum(t.numel() for t in tensors.values()),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "minutes": round((time.monotonic() - started) / 60, 2),
        "log": log,
    }
    (args.out / "training_log.json").write_text(json.dumps(summary, indent=1) + "\n")


def main() -> None:
    """Command line; the defaults are those of the released model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path(".cache/nano_corpus"), help="folder that experiments.nano_training.corpus wrote")
    parser.add_argument("--out", type=Path, default=Path("experiments/qwen3_small"))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=64, help="sequences per step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=200)
    parser.add_argument("--compile", action="store_true", help="torch.compile: faster on a GPU after a minute of compiling")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
