"""Compares llama.cpp with the lab's own forward code on one `qwen4exp` GGUF: token ids, and logits token by token.

`python -m experiments.gguf_llama_check FILE.gguf --source FOLDER`. Why: that a file loads proves nothing; names, orders, folded norms, hash and indexer
are right when two implementations that share no code agree. Both sides compute from the file's weights, dequantised to float32 here.
What it does not prove: speed, or long contexts beyond the tokens compared. With block types llama.cpp quantises activations to 8 bits as well, so that
the two differ by that; F32 shows the format alone. Beyond the indexer's budget they differ by design: transformers (and the lab) keep the best blocks
and the tail, llama.cpp always fills up to budget + block - 1 tokens (src/models/qwen4exp.cpp, build_qsa_top_k), which takes up to 3 tokens of one more
block. So tokens before and after that border are compared apart.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from experiments.nano_training.parameters import ParameterBinder
from lab.artifacts.gguf_model import GgufArtifact
from lab.artifacts.hf import HfArtifact
from lab.artifacts.weights import Stored, Weights
from lab.console import console
from lab.errors import LabError
from lab.measure.divergence import kl_divergence
from lab.models import inventory
from lab.models.qwen4_exp.config import Qwen4ExpConfig
from lab.models.qwen4_exp.model import Qwen4Exp
from lab.project import find_project

_F32 = 0  # ggml_type of keys and values, so that the cache rounds nothing
_FLASH_OFF = 0  # llama_flash_attn_type


def dense_model(config: Qwen4ExpConfig, weights: Weights) -> Qwen4Exp:
    """The forward code over float32 copies of every tensor: for small models only. Raises LabError for a tensor that is missing."""
    wanted, tensors = inventory(config), dict[str, Tensor]()
    for name in (*wanted.linears, *wanted.embeddings):
        rows = torch.cat([_dense(block) for block in weights.matrix(name)])
        order = weights.column_order(name)
        tensors[name] = rows if order is None else torch.empty_like(rows).index_copy_(1, order, rows)
    tensors |= {name: weights.vector(name).float() for name in wanted.vectors}
    tensors |= {name: weights.integers(name) for name in wanted.constants}
    for prefix, (count, _, _) in wanted.expert_stacks.items():
        gate_up, down = weights.experts(prefix, count)
        tensors[f"{prefix}.gate_up_proj"] = torch.cat([_dense(block) for block in gate_up], dim=1)
        tensors[f"{prefix}.down_proj"] = _dense(down[0])
    for prefix in wanted.tables:
        tensors[f"{prefix}.weight"] = torch.cat([_dense(weights.table_shard(prefix, i)) for i in range(weights.table_shards(prefix))])
    return Qwen4Exp(config, ParameterBinder(torch.device("cpu"), tensors=tensors))


def _dense(stored: Stored) -> Tensor:
    return stored.codec.decode(stored.parts, stored.shape[-1])


class Llama:
    """A model in llama.cpp on the CPU. Close it: the library keeps its memory until told."""

    def __init__(self, path: Path, context: int, threads: int) -> None:
        """Raises LabError where the binding is missing or the file does not load."""
        try:
            import llama_cpp
        except ImportError:
            raise LabError("this check needs llama-cpp-python: pip install 'migration-lab[llama]'") from None
        self.lib: Any = llama_cpp
        quiet = llama_cpp.llama_log_callback(lambda level, text, _: sys.stderr.write(text.decode(errors="replace")) if level == 4 else None)
        self._quiet = quiet  # the library calls it later
        llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
        settings = llama_cpp.llama_model_default_params()
        settings.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
        if not self.model:
            raise LabError(f"{path}: llama.cpp does not load it; its messages are above")
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = context
        options.n_threads = options.n_threads_batch = threads
        options.type_k = options.type_v = _F32
        options.flash_attn_type = _FLASH_OFF
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        if not self.context:
            raise LabError(f"{path}: llama.cpp makes no context of {context} tokens")

    def tokens(self, text: str) -> list[int]:
        """Ids of a text, special tokens in it read as such, nothing added."""
        raw = text.encode()
        room = (ctypes.c_int32 * (len(raw) + 16))()
        count = self.lib.llama_tokenize(self.vocab, raw, len(raw), room, len(room), False, True)
        return list(room[:count])

    def logits(self, ids: Sequence[int], step: int) -> Tensor:
        """float32 [tokens, vocabulary] of a fresh sequence, decoded `step` tokens at a time. Raises LabError where it fails."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        width, found = self.lib.llama_vocab_n_tokens(self.vocab), []
        for start in range(0, len(ids), step):
            some = ids[start : start + step]
            batch = self.lib.llama_batch_init(len(some), 0, 1)
            batch.n_tokens = len(some)
            for i, token in enumerate(some):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, start + i, 1, 0, 1
            code = self.lib.llama_decode(self.context, batch)
            if code:
                raise LabError(f"llama_decode ends with {code} at token {start}")
            values = np.ctypeslib.as_array(self.lib.llama_get_logits(self.context), shape=(len(some), width))
            found.append(torch.from_numpy(values.copy()))
            self.lib.llama_batch_free(batch)
        return torch.cat(found)

    def close(self) -> None:
        """Frees context and model."""
        self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)


def compare(ours: Tensor, theirs: Tensor) -> list[str]:
    """[largest and mean difference of logits, mean and largest KL(ours || theirs) in nat, share of tokens with the same top choice]."""
    gap, kld = (ours - theirs).abs(), kl_divergence(ours.log_softmax(-1), theirs.log_softmax(-1))
    same = (ours.argmax(-1) == theirs.argmax(-1)).double().mean()
    return [f"{float(gap.max()):.3g}", f"{float(gap.mean()):.3g}", f"{float(kld.mean()):.3g}", f"{float(kld.max()):.3g}", f"{float(same):.4f}"]


def main(argv: Sequence[str]) -> None:
    """Prints one row per comparison. Raises LabError."""
    parser = argparse.ArgumentParser(description="llama.cpp against the lab's forward code on one GGUF")
    parser.add_argument("file", type=Path)
    parser.add_argument("--source", type=Path, help="the checkpoint folder it was made from: compares the file's weights and tokens with it, too")
    parser.add_argument("--text", type=Path, default=find_project().root / "experiments" / "nano" / "heldout.txt")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(argv)
    artifact = GgufArtifact(args.file)
    config = artifact.config()
    if not isinstance(config, Qwen4ExpConfig):
        raise LabError(f"{args.file}: general.architecture is {artifact.architecture}; this check is for qwen4exp")
    text = args.text.read_text(encoding="utf-8")
    llama = Llama(args.file, args.tokens, args.threads)
    try:
        ids = llama.tokens(text)
        if args.source:
            right = HfArtifact(args.source, "qwen4_exp").tokenizer().encode(text, add_special_tokens=False).ids
            print(f"token ids of {len(text)} characters: {'equal' if ids == right else 'DIFFERENT'} ({len(right)} by tokenizer.json, {len(ids)} by llama.cpp)")
        ids = ids[: args.tokens]
        table = Table(title=f"{args.file.name}: {len(ids)} tokens")
        for heading in ("logits compared", "max |d|", "mean |d|", "KLD mean", "KLD max", "same top-1"):
            table.add_column(heading)
        batch = torch.tensor([ids])
        with torch.inference_mode():
            ours = dense_model(config, artifact.weights()).logits(batch)[0]
            if args.source:
                source = HfArtifact(args.source, "qwen4_exp")
                source_config = source.config()
                assert isinstance(source_config, Qwen4ExpConfig)
                released = dense_model(source_config, source.weights()).logits(batch)[0]
                table.add_row("checkpoint, lab | file, lab", *compare(released, ours))
        border = min(len(ids), config.indexer_budget + config.indexer_block - 1)
        for step, name in ((len(ids), "at once"), (1, "one by one"), (7, "by sevens")):
            theirs = llama.logits(ids, step)
            table.add_row(f"file, lab | file, llama.cpp {name}, first {border}", *compare(ours[:border], theirs[:border]))
            if border < len(ids):
                table.add_row(f"file, lab | file, llama.cpp {name}, the rest", *compare(ours[border:], theirs[border:]))
        console().print(table)
    finally:
        llama.close()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except LabError as problem:
        sys.exit(f"error: {problem}")
