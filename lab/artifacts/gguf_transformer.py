"""What the GGUF files of llama, qwen3 and qwen3moe mean: sizes, tensor names, and the rows that llama's conversion moves.

Names: the `gguf` package's MODEL_TENSORS. Keys, and the row order of llama's q and k: llama.cpp's conversion/llama.py and src/models, as in
llama-cpp-python 0.3.36. A key that changes what is computed and that the engine does not compute is refused, not passed over.
What it does not prove: that a file with these keys came from the model it names. A fused attn_qkv (an option of the conversion) is not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lab.artifacts.gguf import Gguf
from lab.artifacts.gguf_metadata import Metadata
from lab.artifacts.gguf_model import Piece, decoded
from lab.errors import LabError

MODEL_TYPES = {"llama": "llama", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
"""general.architecture -> Hugging Face's model_type."""

_TOP = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts": "ffn_{}_exps.weight",
}
_LAYER_NAME = re.compile(r"layers\.(0|[1-9]\d{0,5})\.(.+)")
_ROPE_FACTORS = "rope_freqs.weight"
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_NOT_COMPUTED = (".attention.sliding_window", ".attention.scale", ".logit_scale", ".residual_scale", ".embedding_scale", ".attention.clamp_kqv")
"""Keys of other models under the same architecture names; each would change the logits. 0 means that it is off."""


class TransformerLayout:
    """`lab.artifacts.gguf_model.Layout` of a plain transformer."""

    def __init__(self, gguf: Gguf) -> None:
        """Raises LabError in one line naming file and key."""
        self.gguf, self.metadata = gguf, Metadata(gguf)
        whole = self.metadata.whole
        self.layers = whole(".block_count", most=len(gguf.tensors))  # each layer has tensors of its own
        self.hidden = whole(".embedding_length")
        self.heads = whole(".attention.head_count", most=self.hidden)
        self.kv_heads = whole(".attention.head_count_kv", self.heads, most=self.heads)
        self.head_dim = whole(".attention.key_length", self.hidden // self.heads)
        self._check()

    def _check(self) -> None:
        metadata, whole = self.metadata, self.metadata.whole
        if self.heads % self.kv_heads:
            raise metadata.refuse(".attention.head_count", f"is {self.heads}, no multiple of head_count_kv {self.kv_heads}")
        for key in (".attention.value_length", ".rope.dimension_count"):
            if whole(key, self.head_dim) != self.head_dim:
                raise metadata.refuse(key, f"is {whole(key)}, but heads are {self.head_dim} wide; only equal widths and whole rotary heads are computed")
        if self.head_dim % 2:
            raise metadata.refuse(".attention.key_length", f"is {self.head_dim}; rotary heads need an even width")
        for key in _NOT_COMPUTED:
            if key in metadata and (isinstance(value := metadata.values[metadata.full(key)], list | np.ndarray) or value != 0):
                raise metadata.refuse(key, "is set, and the engine does not compute it")
        if metadata.arch != "qwen3moe" and whole(".expert_count", 0, least=0):
            raise metadata.refuse(".expert_count", f"is {whole('.expert_count')}; a mixture under the name {metadata.arch} (Mixtral) is not supported")

    def config(self) -> dict[str, Any]:
        """Sizes and constants in Hugging Face's words. Raises LabError."""
        metadata, whole = self.metadata, self.metadata.whole
        found = {
            "model_type": MODEL_TYPES[metadata.arch],
            "vocab_size": self._vocab_size(),
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": whole(".feed_forward_length", None if metadata.arch != "qwen3moe" else whole(".expert_feed_forward_length")),
            "hidden_act": "silu",
            "rms_norm_eps": metadata.number(".attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": whole(".context_length"),
            "tie_word_embeddings": _HEAD not in self.gguf.tensors,
            "eos_token_id": whole("tokenizer.ggml.eos_token_id", least=0, most=self._vocab_size() - 1),
            "rope_parameters": {"rope_theta": metadata.number(".rope.freq_base", 10000.0), **self._scaling()},
        }
        if metadata.arch == "qwen3moe":
            found |= self._mixture()
        if _ROPE_FACTORS in self.gguf.tensors:
            found["rope_factors"] = self._rope_factors()
        return found

    def _vocab_size(self) -> int:
        embedding = self.gguf.tensors.get(_EMBEDDING)
        if embedding is None or len(embedding.shape) != 2:
            raise LabError(f"{self.metadata.where}: tensor {_EMBEDDING} is {'missing' if embedding is None else 'no matrix'}; not a whole model")
        return embedding.shape[0]

    def _mixture(self) -> dict[str, Any]:
        experts = self.metadata.whole(".expert_count", most=65536)
        return {
            "num_experts": experts,
            "num_experts_per_tok": self.metadata.whole(".expert_used_count", most=experts),
            "moe_intermediate_size": self.metadata.whole(".expert_feed_forward_length"),
            "norm_topk_prob": True,  # in no key: llama.cpp's graph of qwen3moe always normalises the chosen weights
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }

    def _scaling(self) -> dict[str, Any]:
        """RoPE scaling as llama.cpp reads it: without a type, a factor means linear; `rope.scale_linear` is the older key of the same factor."""
        metadata = self.metadata
        kind = metadata.text(".rope.scaling.type", "linear")
        if kind not in ("none", "linear"):
            raise metadata.refuse(".rope.scaling.type", f"is {kind!r}; supported: none, linear, and factors in {_ROPE_FACTORS}")
        if metadata.number(".rope.scaling.attn_factor", 1.0) != 1:
            raise metadata.refuse(".rope.scaling.attn_factor", "is set, and the engine does not compute it")
        factor = metadata.number(".rope.scaling.factor", metadata.number(".rope.scale_linear", 1.0))
        return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor not in (0, 1) else {"rope_type": "default"}

    def _rope_factors(self) -> list[float]:
        """What each inverse frequency is divided by (llama3's scaling, precomputed), one for each pair of a head's values."""
        tensor = self.gguf.tensors[_ROPE_FACTORS]
        if tensor.shape != (self.head_dim // 2,):
            raise LabError(f"{tensor.path}: tensor {_ROPE_FACTORS} has shape {list(tensor.shape)}; heads of {self.head_dim} need {self.head_dim // 2} factors")
        factors = decoded(self.gguf, _ROPE_FACTORS)
        if not bool((torch.isfinite(factors) & (factors > 0)).all()):
            raise LabError(f"{tensor.path}: tensor {_ROPE_FACTORS} holds a factor that is not above zero; damaged")
        return [float(each) for each in factors]

    def _named(self, name: str) -> str:
        """The file's name of a tensor. Raises LabError for a name that this architecture does not have."""
        if name == "lm_head.weight" and _HEAD not in self.gguf.tensors:
            return _EMBEDDING
        if name in _TOP:
            return _TOP[name]
        match = _LAYER_NAME.fullmatch(name)
        if match is None or int(match[1]) >= self.layers or match[2] not in _LAYER:
            raise LabError(f"{self.metadata.where}: no tensor {name!r} in the names of {self.metadata.arch} with {self.layers} layers")
        return f"blk.{match[1]}.{_LAYER[match[2]]}"

    def matrix(self, name: str) -> Sequence[Piece]:
        """One piece; llama's q and k with their rows put back."""
        stored = self._named(name)
        heads = {"q_proj": self.heads, "k_proj": self.kv_heads}.get(name.split(".")[-2]) if self.metadata.arch == "llama" else None
        return (Piece(stored, None if heads is None else _rotary_rows(heads, self.head_dim)),)

    def column_order(self, name: str) -> Tensor | None:
        """None: columns are in the model's order."""
        return None

    def vector(self, name: str, read: Callable[[str], Tensor]) -> Tensor:
        """As in the file: these architectures fold nothing into a norm."""
        return read(self._named(name))

    def integers(self, name: str) -> Tensor:
        """Raises LabError: there are none."""
        raise LabError(f"{self.metadata.where}: {self.metadata.arch} has no integer constant {name!r}")

    def experts(self, prefix: str) -> tuple[Sequence[Piece], Sequence[Piece]]:
        """Gate and up apart."""
        stored = self._named(prefix)
        return (Piece(stored.format("gate")), Piece(stored.format("up"))), (Piece(stored.format("down")),)

    def table(self, prefix: str) -> Sequence[Piece]:
        """Raises LabError: there is none."""
        raise LabError(f"{self.metadata.where}: {self.metadata.arch} has no table {prefix!r}")

    def unused(self) -> frozenset[str]:
        """The rotary factors, which `config` has read."""
        return frozenset({_ROPE_FACTORS})


def _rotary_rows(heads: int, width: int) -> npt.NDArray[np.int64]:
    """Hugging Face's row r is row [r] of the file. The conversion turns each head's two halves, [2, width / 2], into neighbouring pairs, [width / 2, 2]."""
    return np.arange(heads * width, dtype=np.int64).reshape(heads, width // 2, 2).swapaxes(1, 2).reshape(-1)
