"""The names of `qwen4exp` in GGUF beside those of the Hugging Face checkpoint, and what happens to a tensor between the two. Read by reader and writer.

Why one table: a name or an order that only one side knows gives a file that loads and talks nonsense. Source of names and orders: llama.cpp's
gguf-py/gguf/constants.py, conversion/qwen4exp.py and conversion/qwen.py (read in the sources that llama-cpp-python 0.3.36 ships).
What it does not prove: that a file's tensors have these shapes; `lab.artifacts.gguf_model` and llama.cpp check that.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

Order = npt.NDArray[np.int64]

ARCH = "qwen4exp"
TABLE = "per_layer_token_embd.weight"
"""The n-gram table as one tensor [rows, width]."""


class Change(Enum):
    """What the converter does to a tensor on its way into the file."""

    NONE = "as it is"
    PLUS_ONE = "w + 1: the norm's weight multiplies directly"
    HEADS = "rows of one per value head, tiled"
    VALUES = "rows of whole value heads, tiled"
    QKV = "rows: keys and queries as they are, then whole value heads, tiled"
    COLUMNS = "columns of whole value heads, tiled"
    DECAY = "-exp(A_log), tiled"
    TAPS = "[channels, 1, kernel] without the 1"
    TAPS_QKV = "as TAPS, with channels as in QKV"


GLOBAL_MATRICES: dict[str, str] = {
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "hyper_connection_mixer.input_mix_weight_down.weight": "output_hc_down.weight",
    "hyper_connection_mixer.input_mix_weight_up.weight": "output_hc_up.weight",
}
GLOBAL_VECTORS: dict[str, tuple[str, Change]] = {"hyper_connection_mixer.hc_norm.weight": ("output_hc_norm.weight", Change.PLUS_ONE)}

MATRICES: dict[str, tuple[str, Change]] = {
    **{
        f"{hf}_hyper_connection.{part}.weight": (f"hc_{gguf}_{short}.weight", Change.NONE)
        for hf, gguf in (("attn", "attn"), ("mlp", "ffn"))
        for part, short in (("input_mix_weight_down", "down"), ("input_mix_weight_up", "up"), ("block_inject_weight", "inject"))
    },
    "linear_attn.in_proj_qkv.weight": ("attn_qkv.weight", Change.QKV),
    "linear_attn.in_proj_z.weight": ("attn_gate.weight", Change.VALUES),
    "linear_attn.in_proj_a.weight": ("ssm_alpha.weight", Change.HEADS),
    "linear_attn.in_proj_b.weight": ("ssm_beta.weight", Change.HEADS),
    "linear_attn.out_proj.weight": ("ssm_out.weight", Change.COLUMNS),
    "self_attn.q_proj.weight": ("attn_q.weight", Change.NONE),
    "self_attn.k_proj.weight": ("attn_k.weight", Change.NONE),
    "self_attn.v_proj.weight": ("attn_v.weight", Change.NONE),
    "self_attn.o_proj.weight": ("attn_output.weight", Change.NONE),
    "mlp.gate.weight": ("ffn_gate_inp.weight", Change.NONE),
    "mlp.shared_expert_gate.weight": ("ffn_gate_inp_shexp.weight", Change.NONE),
    "mlp.shared_expert.gate_proj.weight": ("ffn_gate_shexp.weight", Change.NONE),
    "mlp.shared_expert.up_proj.weight": ("ffn_up_shexp.weight", Change.NONE),
    "mlp.shared_expert.down_proj.weight": ("ffn_down_shexp.weight", Change.NONE),
    "ple.key_proj.weight": ("ple_key.weight", Change.NONE),
    "ple.value_proj.weight": ("ple_value.weight", Change.NONE),
}
"""Below `layers.N.` and `blk.N.`. The indexer's matrix and the experts are apart: they become several tensors."""

INDEXER = ("self_attn.indexer.index_qk_proj.weight", "indexer.q_proj.weight", "indexer.k_proj.weight")
EXPERTS = ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight")
FUSED_EXPERTS = "ffn_gate_up_exps.weight"
"""llama.cpp also reads gate and up as one stack, gate rows first."""

VECTORS: dict[str, tuple[str, Change]] = {
    "attn_hyper_connection.hc_norm.weight": ("hc_attn_norm.weight", Change.PLUS_ONE),
    "mlp_hyper_connection.hc_norm.weight": ("hc_ffn_norm.weight", Change.PLUS_ONE),
    "linear_attn.conv1d.weight": ("ssm_conv1d.weight", Change.TAPS_QKV),
    "linear_attn.A_log": ("ssm_a", Change.DECAY),
    "linear_attn.dt_bias": ("ssm_dt.bias", Change.HEADS),
    "linear_attn.norm.weight": ("ssm_norm.weight", Change.NONE),
    "self_attn.q_norm.weight": ("attn_q_norm.weight", Change.PLUS_ONE),
    "self_attn.k_norm.weight": ("attn_k_norm.weight", Change.PLUS_ONE),
    "self_attn.indexer.q_layernorm.weight": ("indexer.q_norm.weight", Change.PLUS_ONE),
    "self_attn.indexer.k_layernorm.weight": ("indexer.k_norm.weight", Change.PLUS_ONE),
    "ple.norm_key.weight": ("ple_norm_key.weight", Change.PLUS_ONE),
    "ple.norm_query.weight": ("ple_norm_query.weight", Change.PLUS_ONE),
    "ple.norm_conv.weight": ("ple_norm_conv.weight", Change.PLUS_ONE),
    "ple.conv1d.weight": ("ple_conv1d.weight", Change.TAPS),
}

CONSTANTS: dict[str, str] = {
    "ple.ple_embedding.layer_multipliers": ".ple.layer_multipliers",
    "ple.ple_embedding.ngram_heads_vocab_sizes": ".ple.head_vocab_sizes",
    "ple.ple_embedding.ngram_heads_offsets": ".ple.head_offsets",
}
"""int64 constants of the checkpoint and the metadata keys that hold them as uint64."""

SEED_KEY = "lab.ngram_seed"
"""Ours: the seed that the multipliers come from. llama.cpp needs the multipliers alone; a file of another writer has the released seed."""
RELEASED_SEED = 1234


@dataclass(frozen=True)
class ValueHeads:
    """The order of value heads. The checkpoint groups the r value heads of each of K key heads (k r + j); ggml repeats keys over values, so that the
    file has them tiled (j K + k)."""

    key_heads: int
    value_heads: int
    key_width: int
    """Width of all key heads together."""
    head_width: int
    """Of one value head."""

    def to_file(self, change: Change) -> Order | None:
        """order with file[i] = checkpoint[order[i]], along rows (COLUMNS: along columns). None where nothing moves."""
        share = self.value_heads // self.key_heads
        return self._spread(change, np.arange(self.value_heads).reshape(self.key_heads, share))

    def from_file(self, change: Change) -> Order | None:
        """order with checkpoint[i] = file[order[i]]: the inverse."""
        share = self.value_heads // self.key_heads
        return self._spread(change, np.arange(self.value_heads).reshape(share, self.key_heads))

    def _spread(self, change: Change, heads: Order) -> Order | None:
        turned = heads.T.reshape(-1)
        if self.key_heads in (1, self.value_heads) or change in (Change.NONE, Change.PLUS_ONE, Change.TAPS):
            return None
        if change in (Change.HEADS, Change.DECAY):
            return turned
        wide = (turned[:, None] * self.head_width + np.arange(self.head_width)).reshape(-1)
        if change in (Change.VALUES, Change.COLUMNS):
            return wide
        return np.concatenate((np.arange(2 * self.key_width), 2 * self.key_width + wide))
