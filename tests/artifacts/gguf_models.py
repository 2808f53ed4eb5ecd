"""Whole small GGUF models, made by transformers and written by the `gguf` package, so that names, values, bytes and headers come from code that is not ours.

The one thing written here is the order of llama's q and k rows, as llama.cpp's conversion/llama.py has it; transformers' reader of GGUF is asked whether it
agrees. `lies` replaces any metadata value, and `drop`, `rename` and `reshape` spoil the table.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

NANO_TOKENIZER = Path(__file__).parents[2] / "experiments" / "nano" / "tokenizer.json"
EXTRA_TOKENS = [("<|im_start|>", 3), ("<tool>", 4), ("<tool><name>", 4), ("  \n", 4), ("<unk>", 2), ("[PAD2565]", 5), ("</s>", 1)]
"""Text and type: two control or unknown tokens, user-defined ones of which one begins another, an unused one, and an end that is typed as normal text."""


@dataclass
class Vocabulary:
    """Tokens with their types, and merges, as a GGUF file keeps them."""

    tokens: list[str]
    types: list[int]
    merges: list[str]


def nano_vocabulary(extra: bool = True) -> Vocabulary:
    """The tokens of the model that ships with the project, and `EXTRA_TOKENS`."""
    more = EXTRA_TOKENS if extra else []
    data = json.loads(NANO_TOKENIZER.read_text(encoding="utf-8"))
    by_id = sorted(data["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["content"] for token in data["added_tokens"]}
    tokens = [token for token, _ in by_id]
    types = [3 if token in special else 1 for token in tokens]
    return Vocabulary(tokens + [t for t, _ in more], types + [k for _, k in more], [" ".join(pair) for pair in data["model"]["merges"]])


def pairs_vocabulary(without: str = "") -> Vocabulary:
    """Every byte and every pair of bytes, merged in random order, so that hardly a border between pieces can move without changing the tokens; two words
    that no merges make; and `EXTRA_TOKENS`. The bytes `without` (as the vocabulary spells them) are left out."""
    alphabet = [each for each in _byte_characters() if each not in without]
    pairs = [(left, right) for left in alphabet for right in alphabet]
    random.Random(0).shuffle(pairs)
    tokens = [*alphabet, *("".join(pair) for pair in pairs), "<|endoftext|>", "Ġhello", "wörld".encode().decode("latin-1")]
    types = [1] * (len(alphabet) + len(pairs)) + [3, 1, 1]
    return Vocabulary(tokens + [t for t, _ in EXTRA_TOKENS], types + [k for _, k in EXTRA_TOKENS], [" ".join(pair) for pair in pairs])


def small_vocabulary(size: int) -> Vocabulary:
    """A vocabulary of exactly `size` tokens, at least 260: the bytes, an end token (256), three merged ones, and unused ones."""
    tokens = [*_byte_characters(), "<|endoftext|>", "Ġt", "he", "Ġthe", *(f"[PAD{i}]" for i in range(260, size))]
    return Vocabulary(tokens, [1] * 256 + [3] + [1] * 3 + [5] * (size - 260), ["Ġ t", "h e", "Ġt he"])


def _byte_characters() -> Iterable[str]:
    """The 256 characters that stand for bytes in GPT-2's vocabulary (printable Latin-1 as itself, the others from U+0100 on)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    yield from map(chr, plain)
    yield from (chr(256 + i) for i in range(256 - len(plain)))


VOCABULARIES: dict[str, Callable[[], Vocabulary]] = {"nano": nano_vocabulary, "pairs": pairs_vocabulary, "gaps": lambda: pairs_vocabulary("ĖĄ!Àñ")}
"""What golden tokens are made with. In `gaps` the bytes 0x16, 0x04, 0x21, 0xC0 and 0xF1 have no token, as some have none in SmolLM2."""


@dataclass
class Model:
    """A model to write: Hugging Face's state dict without `model.`, metadata by key, and how to store each tensor (by GGUF name)."""

    arch: str
    state: dict[str, Tensor]
    values: dict[str, Any]
    vocabulary: Vocabulary
    permuted_heads: dict[str, int]
    kind_of: Callable[[str], Kind] = lambda name: Kind.F32
    lies: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    change: Callable[[str, npt.NDArray[Any]], tuple[str, npt.NDArray[Any]] | None] = lambda name, data: (name, data)

    def write(self, path: Path) -> Path:
        """Writes it and gives the path back. A lie of None leaves the key out; `change` may rename, alter or drop a tensor."""
        writer = gguf.GGUFWriter(path, self.arch)
        writer.kv_data[0].clear()  # the writer puts the architecture there
        for key, value in ({"general.architecture": self.arch, **self.values, **tokenizer_values(self.vocabulary)} | self.lies).items():
            if value is not None:
                add_value(writer, key, value)
        for name, data in {**self.tensors(), **self.extra}.items():
            changed = self.change(name, data)
            if changed is None:
                continue
            kind = self.kind_of(name) if changed[1].ndim > 1 else Kind.F32
            if changed[1].dtype == np.float32:
                writer.add_tensor(changed[0], gguf.quants.quantize(changed[1], kind), raw_dtype=kind)
            else:
                writer.add_tensor(*changed)  # in the type that NumPy's says
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """float32 by GGUF name: the `gguf` package's own map of names, llama's rows permuted, experts' gate and up apart."""
        names = name_map(self.arch)
        found: dict[str, npt.NDArray[Any]] = {}
        for name, tensor in self.state.items():
            data = tensor.detach().float().numpy()
            if name.endswith("experts.gate_up_proj"):
                base, width = name.removesuffix("gate_up_proj"), data.shape[1] // 2
                split = {f"{base}gate_proj.weight": data[:, :width], f"{base}up_proj.weight": data[:, width:]}
            else:
                split = {name if name.endswith(".weight") else f"{name}.weight": data}
            for each, part in split.items():
                stored = names.get_name(each if each.startswith("lm_head") else f"model.{each}", try_suffixes=(".weight",))
                assert stored is not None, each
                heads = self.permuted_heads.get(each.split(".")[-2])
                found[stored] = np.ascontiguousarray(part if heads is None else interleaved(part, heads))
        return found


def name_map(arch: str) -> gguf.TensorNameMap:
    """The `gguf` package's names for Hugging Face's."""
    return gguf.get_tensor_name_map(next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), 16)


def interleaved(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Each head's halves as neighbouring pairs, which is how llama.cpp wants llama's q and k."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def tokenizer_values(vocabulary: Vocabulary, pre: str = "qwen2") -> dict[str, Any]:
    """The tokenizer's metadata."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": vocabulary.tokens,
        "tokenizer.ggml.token_type": vocabulary.types,
        "tokenizer.ggml.merges": vocabulary.merges,
        "tokenizer.ggml.bos_token_id": vocabulary.tokens.index("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": vocabulary.tokens.index("<|endoftext|>"),
    }


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """A value in the type that its Python type stands for; whole numbers as the 32-bit types of the conversion."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        (writer.add_uint32 if value >= 0 else writer.add_int32)(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def write_vocabulary(path: Path, pre: str, vocabulary: Vocabulary, **lies: Any) -> Path:
    """A file with a tokenizer and sizes, and no tensor: enough for a tokenizer, in llama.cpp too."""
    model = Model("llama", {}, _sizes("llama", 1, 64, 2, 2, 32, 64, 128), vocabulary, {}, lies={"tokenizer.ggml.pre": pre, **lies})
    return model.write(path)


def _sizes(arch: str, layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, width: int, context: int) -> dict[str, Any]:
    return {
        f"{arch}.block_count": layers,
        f"{arch}.context_length": context,
        f"{arch}.embedding_length": hidden,
        f"{arch}.feed_forward_length": width,
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": kv_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 50000.0,
        f"{arch}.rope.dimension_count": head_dim,
    }


VOCAB, HIDDEN, LAYERS, WIDTH, CONTEXT = 263, 96, 3, 64, 512
EXPERTS, EXPERTS_USED = 5, 2


def hf_model(arch: str, tied: bool = False, seed: int = 0) -> PreTrainedModel:
    """A random model of transformers, every weight drawn anew (norms too, which are born as ones)."""
    heads, kv_heads, head_dim = _HEADS[arch]
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": WIDTH,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        "tie_word_embeddings": tied,
        "eos_token_id": 256,
        "bos_token_id": 256,
        "pad_token_id": None,
    }
    mixture = {"num_experts": EXPERTS, "num_experts_per_tok": EXPERTS_USED, "moe_intermediate_size": WIDTH, "norm_topk_prob": True, "decoder_sparse_step": 1}
    torch.manual_seed(seed)
    model: PreTrainedModel = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**sizes)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**sizes)),
        "qwen3moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **mixture)),
    }[arch]()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


_HEADS = {"llama": (6, 2, 16), "qwen3": (3, 1, 32), "qwen3moe": (4, 2, 16)}
"""(heads, kv heads, head width): as wide as the model in llama and qwen3, narrower in qwen3moe."""


def model_of(hf: PreTrainedModel, arch: str) -> Model:
    """What to write for a model of `hf_model`."""
    heads, kv_heads, head_dim = _HEADS[arch]
    tied = hf.config.tie_word_embeddings
    state = {name.removeprefix("model."): tensor for name, tensor in hf.state_dict().items() if not (tied and name == "lm_head.weight")}
    values = _sizes(arch, LAYERS, HIDDEN, heads, kv_heads, head_dim, WIDTH, CONTEXT) | {f"{arch}.vocab_size": VOCAB}
    if arch == "qwen3moe":
        values |= {f"{arch}.expert_count": EXPERTS, f"{arch}.expert_used_count": EXPERTS_USED, f"{arch}.expert_feed_forward_length": WIDTH}
    permuted = {"q_proj": heads, "k_proj": kv_heads} if arch == "llama" else {}
    return Model(arch, state, values, small_vocabulary(VOCAB), permuted)
