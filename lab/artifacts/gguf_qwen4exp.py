"""A `qwen4exp` GGUF in the words of the Hugging Face checkpoint: sizes from its metadata, and which tensors give which rows.

Undoes what the converter did: norms without the folded 1, A_log and not -exp(A_log), convolution taps [channels, 1, kernel], value heads grouped by key
head. Rows are put in order packed; the columns of `ssm_out` lie inside packed blocks and stay, and `column_order` says their order.
What it does not prove: that the writer folded and tiled as llama.cpp's converter does; nothing in a file says so. Keys: llama.cpp's
src/models/qwen4exp.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.artifacts import gguf_names_qwen4exp as names
from lab.artifacts.gguf import Gguf
from lab.artifacts.gguf_cursor import quoted
from lab.artifacts.gguf_metadata import Metadata
from lab.artifacts.gguf_model import Piece
from lab.artifacts.gguf_names_qwen4exp import Change, ValueHeads
from lab.errors import LabError

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_MOST_NGRAM, _MOST_HEADS, _MOST_WIDTH = 16, 256, 1 << 24  # far above any model: what a lying header may make of loops and lists


class Qwen4ExpLayout:
    """`lab.artifacts.gguf_model.Layout` of the architecture `qwen4exp`."""

    def __init__(self, gguf: Gguf) -> None:
        """Raises LabError in one line naming file and key."""
        self.gguf, self.meta = gguf, Metadata(gguf)
        self.layers = self._layers()
        self._config = self._read_config()
        c = self._config
        key_width = c["linear_num_key_heads"] * c["linear_key_head_dim"]
        self.heads = ValueHeads(c["linear_num_key_heads"], c["linear_num_value_heads"], key_width, c["linear_value_head_dim"])
        self.key_rows = key_width

    def config(self) -> dict[str, Any]:
        """config.json of the text model. What the format does not say is fixed by it: a sigmoid gate, renormalised routing, one table."""
        return dict(self._config)

    def matrix(self, name: str) -> Sequence[Piece]:
        """One piece, or two for the indexer's query and key rows."""
        if name in names.GLOBAL_MATRICES:
            return (Piece(names.GLOBAL_MATRICES[name]),)
        layer, suffix = self._split(name)
        if suffix == names.INDEXER[0]:
            return tuple(Piece(f"blk.{layer}.{part}") for part in names.INDEXER[1:])
        if suffix not in names.MATRICES:
            raise self._unknown(name)
        tensor, change = names.MATRICES[suffix]
        order = None if change is Change.COLUMNS else self.heads.from_file(change)
        return (Piece(f"blk.{layer}.{tensor}", order),)

    def column_order(self, name: str) -> Tensor | None:
        """The value heads' order for `out_proj`, else None."""
        if not name.endswith(".linear_attn.out_proj.weight"):
            return None
        order = self.heads.to_file(Change.COLUMNS)
        return None if order is None else torch.from_numpy(order)

    def vector(self, name: str, read: Callable[[str], Tensor]) -> Tensor:
        """float32 in the checkpoint's shape. Raises LabError for a decay that is no -exp(A_log)."""
        if name in names.GLOBAL_VECTORS:
            tensor, change = names.GLOBAL_VECTORS[name]
        else:
            layer, suffix = self._split(name)
            if suffix not in names.VECTORS:
                raise self._unknown(name)
            tensor, change = names.VECTORS[suffix]
            tensor = f"blk.{layer}.{tensor}"
        values = read(tensor)
        order = self.heads.from_file(Change.QKV if change is Change.TAPS_QKV else change)
        if order is not None:
            if len(values) != len(order):
                raise LabError(f"{self.meta.where}: tensor {tensor} has {len(values)} rows; the metadata's heads ask for {len(order)}")
            values = values[torch.from_numpy(order)]
        if change is Change.PLUS_ONE:
            return values.reshape(-1) - 1.0  # some writers keep [streams, hidden]
        if change in (Change.TAPS, Change.TAPS_QKV):
            return values.unsqueeze(1)
        if change is Change.DECAY:
            if not bool((values < 0).all()):
                raise LabError(f"{self.meta.where}: tensor {tensor} holds values that are not negative; it should hold -exp(A_log)")
            return torch.log(-values)
        return values

    def integers(self, name: str) -> Tensor:
        """int64 from a metadata array. Raises LabError where a value does not fit."""
        layer, suffix = self._split(name)
        key = names.CONSTANTS.get(suffix)
        if key is None or [layer + 1] != self._config["ple_layer_ids"]:
            raise self._unknown(name)
        values = self.meta.wholes(key)
        heads = (self._config["ngram_size"] - 1) * self._config["heads_per_ngram"]
        expected = self._config["ngram_size"] if key.endswith("multipliers") else heads
        if len(values) != expected or not all(0 <= value < 1 << 63 for value in values):
            raise self.meta.refuse(key, f"has {len(values)} values; expected {expected} that fit 63 bits")
        return torch.tensor(values, dtype=torch.int64)

    def experts(self, prefix: str) -> tuple[Sequence[Piece], Sequence[Piece]]:
        """Gate and up apart, or fused where the file has them so; down."""
        layer, suffix = self._split(prefix)
        if suffix != "mlp.experts":
            raise self._unknown(prefix)
        gate, up, down = (Piece(f"blk.{layer}.{part}") for part in names.EXPERTS)
        fused = Piece(f"blk.{layer}.{names.FUSED_EXPERTS}")
        return ((fused,) if fused.tensor in self.gguf.tensors else (gate, up)), (down,)

    def table(self, prefix: str) -> Sequence[Piece]:
        """The one tensor that all shards became."""
        if not prefix.endswith("ple.ple_embedding.ngram_embedding"):
            raise self._unknown(prefix)
        return (Piece(names.TABLE),)

    def unused(self) -> frozenset[str]:
        """The draft head (MTP): blocks behind the text model's layers."""
        block = re.compile(r"blk\.(\d+)\.")
        return frozenset(t for t in self.gguf.tensors if (m := block.match(t)) and int(m[1]) >= self.layers)

    def _split(self, name: str) -> tuple[int, str]:
        found = _LAYER.fullmatch(name)
        if found is None or int(found[1]) >= self.layers:
            raise self._unknown(name)
        return int(found[1]), found[2]

    def _unknown(self, name: str) -> LabError:
        return LabError(f"{self.meta.where}: qwen4exp has no tensor for {quoted(name)}")

    def _layers(self) -> int:
        """Layers of the text model; `block_count` counts the draft head's, too."""
        blocks = self.meta.whole(".block_count", most=max(1, len(self.gguf.tensors)))  # each has tensors of its own
        return blocks - self.meta.whole(".nextn_predict_layers", 0, least=0, most=blocks - 1)

    def _read_config(self) -> dict[str, Any]:
        whole, meta = self.meta.whole, self.meta
        if meta.text(".rope.scaling.type", "none") != "none":
            raise meta.refuse(".rope.scaling.type", f"is {meta.text('.rope.scaling.type')!r}; only unscaled rotary positions are supported")
        for key in (".rope.scaling.factor", ".rope.scale_linear", ".rope.scaling.attn_factor"):
            if meta.number(key, 1.0) not in (0, 1):
                raise meta.refuse(key, f"is {meta.number(key)}; only unscaled rotary positions are supported")
        head_dim, hidden = whole(".attention.key_length"), whole(".embedding_length")
        if whole(".attention.value_length", head_dim) != head_dim:
            raise meta.refuse(".attention.value_length", f"is not the key length of {head_dim}")
        value_heads, inner = whole(".ssm.time_step_rank", most=1 << 16), whole(".ssm.inner_size", most=_MOST_WIDTH)
        if inner % value_heads:
            raise meta.refuse(".ssm.inner_size", f"is {inner}, no multiple of the {value_heads} value heads (ssm.time_step_rank)")
        embedding = self.gguf.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise LabError(f"{meta.where}: tensor token_embd.weight is {'missing' if embedding is None else 'no matrix'}; not a whole model")
        sparse, block = self._sparse()
        return {
            "model_type": "qwen4_exp_text",
            "vocab_size": embedding.shape[0],
            "hidden_size": hidden,
            "num_hidden_layers": self.layers,
            "layer_types": ["full_attention" if each else "linear_attention" for each in sparse],
            "rms_norm_eps": meta.number(".attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "output.weight" not in self.gguf.tensors,
            "max_position_embeddings": whole(".context_length"),
            "num_attention_heads": whole(".attention.head_count"),
            "num_key_value_heads": whole(".attention.head_count_kv"),
            "head_dim": head_dim,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": meta.number(".rope.freq_base"),
                "partial_rotary_factor": _share(whole(".rope.dimension_count", most=head_dim), head_dim),
            },
            "linear_num_key_heads": self._key_heads(value_heads),
            "linear_num_value_heads": value_heads,
            "linear_key_head_dim": whole(".ssm.state_size", most=_MOST_WIDTH // value_heads),
            "linear_value_head_dim": inner // value_heads,
            "linear_conv_kernel_dim": whole(".ssm.conv_kernel", most=64),
            "output_gate_type": "sigmoid",
            "num_experts": whole(".expert_count", most=1 << 16),
            "num_experts_per_tok": whole(".expert_used_count", most=1 << 16),
            "norm_topk_prob": True,
            "moe_intermediate_size": whole(".expert_feed_forward_length"),
            "shared_expert_intermediate_size": whole(".expert_shared_feed_forward_length"),
            "hc_count": whole(".hyper_connection.count", least=2, most=64),
            "hc_lowrank": whole(".hyper_connection.low_rank"),
            "indexer_n_heads": whole(".attention.indexer.head_count"),
            "indexer_head_dim": whole(".attention.indexer.key_length"),
            "indexer_budget": whole(".attention.indexer.top_k"),
            "indexer_compress_ratio": block,
            **self._ple_config(hidden),
        }

    def _key_heads(self, value_heads: int) -> int:
        key_heads = self.meta.whole(".ssm.group_count", most=value_heads)
        if value_heads % key_heads:
            raise self.meta.refuse(".ssm.group_count", f"is {key_heads}, which does not divide the {value_heads} value heads (ssm.time_step_rank)")
        return key_heads

    def _sparse(self) -> tuple[list[bool], int]:
        """(which layers have sparse attention, its block size in tokens)."""
        interval = self.meta.whole(".full_attention_interval", 4)
        sparse = [(i + 1) % interval == 0 for i in range(self.layers)]
        if ".attention.recurrent_layers" in self.meta:
            recurrent = self.gguf.metadata[f"{names.ARCH}.attention.recurrent_layers"]
            if not isinstance(recurrent, np.ndarray) or recurrent.dtype != np.bool_ or len(recurrent) < self.layers:
                raise self.meta.refuse(".attention.recurrent_layers", f"is no list of true and false for {self.layers} layers")
            sparse = [not each for each in recurrent[: self.layers].tolist()]
        ratios = self.meta.wholes(".attention.compress_ratios")
        used = {ratio for ratio, each in zip(ratios, sparse, strict=False) if each}
        if len(ratios) < self.layers or len(used) > 1 or 0 in used:
            raise self.meta.refuse(".attention.compress_ratios", f"has {len(ratios)} values, {sorted(used)} on the attention layers; expected one size for all")
        return sparse, next(iter(used), 4)

    def _ple_config(self, hidden: int) -> dict[str, Any]:
        """The n-gram table's fields. Nothing of them is needed without one but the end-of-text token."""
        meta = self.meta
        layers = meta.wholes(".ple.layers") if ".ple.layers" in meta else []
        if len(layers) > 1 or not all(0 <= layer < self.layers for layer in layers):
            raise meta.refuse(".ple.layers", f"is {layers[:4]}; expected one layer below {self.layers}")
        if not layers:
            return {"ple_layer_ids": [], "ple_embed_dim": hidden, "eos_token_id": meta.whole("tokenizer.ggml.eos_token_id", least=0), "heads_per_ngram": 1}
        size, per = meta.whole(".ple.ngram_size", least=2, most=_MOST_NGRAM), meta.whole(".ple.heads_per_ngram", most=_MOST_HEADS)
        sizes = meta.wholes(".ple.head_vocab_sizes")
        if len(sizes) < (size - 1) * per or min(sizes) < 1 or sum(sizes) >= 1 << 40:
            raise meta.refuse(".ple.head_vocab_sizes", f"has {len(sizes)} values; expected {(size - 1) * per} sizes above zero")
        table = self.gguf.tensors.get(names.TABLE)
        rows = table.shape[0] if table is not None else 0
        # The divisor itself is in no file; one that gives this many rows does.
        divisor = 128 if rows == -(-sum(sizes) // 128) * 128 else max(rows, 1)
        return {
            "ple_layer_ids": [layers[0] + 1],
            "ple_embed_dim": (size - 1) * per * meta.whole(".embedding_length_per_layer_input"),
            "ple_conv_kernel_size": meta.whole(".ple.conv_kernel", most=64),
            "ngram_size": size,
            "heads_per_ngram": per,
            "ngram_vocab_size_base": sizes[0],
            "make_ngram_vocab_size_divisible_by": divisor,
            "split_ngram_parts": 1,
            "seed": meta.whole(names.SEED_KEY, names.RELEASED_SEED, least=0, most=(1 << 63) - 1),
            "eos_token_id": meta.whole(".ple.eos_token_id", least=0),
        }


def _share(part: int, whole: int) -> float:
    """part / whole such that int(whole * share) gives the part again, whatever the rounding."""
    share = part / whole
    return share if int(whole * share) == part else math.nextafter(share, 1.0)
