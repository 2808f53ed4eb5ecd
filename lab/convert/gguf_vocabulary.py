"""A tokenizer.json as GGUF metadata: tokens, their kinds, merges, and the name of the pre-tokeniser that llama.cpp knows for its pattern.

Why the pattern decides: llama.cpp has pre-tokenisers built in and takes them by name; under a wrong name it splits text differently and nothing says so. A
pattern it does not have is refused. Facts: llama.cpp's src/llama-vocab.cpp and conversion/base.py; token kinds: its llama_token_type.
What it does not prove: equal ids on every text. llama.cpp normalises nothing, so that text which is not NFC gets other ids there where the tokenizer has NFC.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lab.artifacts.gguf_writer import MetaValue
from lab.errors import LabError

_QWEN35 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENISERS = {_QWEN35: "qwen35", _QWEN2: "qwen2"}
"""The splitting pattern of tokenizer.json -> tokenizer.ggml.pre. The patterns that models of this architecture come with."""

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


def vocabulary(path: Path, vocab_size: int, eos: int, bos: int | None) -> dict[str, MetaValue]:
    """The `tokenizer.` keys for a tokenizer.json. Raises LabError in one line where it is none, or nothing that llama.cpp's byte-level BPE computes."""
    data = _parsed(path)
    model = _mapping(path, data, "model")
    if model.get("type") != "BPE" or model.get("byte_fallback") or model.get("ignore_merges"):
        raise LabError(f"{path}: model: only byte-level BPE that follows its merges can be written")
    pre = _pre(path, data)
    normaliser = None if data.get("normalizer") is None else _mapping(path, data, "normalizer").get("type")
    if normaliser not in (None, "NFC"):
        raise LabError(f"{path}: normalizer {normaliser!r} is not supported; llama.cpp normalises nothing")
    tokens, kinds = _tokens(path, data, model, vocab_size)
    found: dict[str, MetaValue] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds, dtype=np.int32),
        "tokenizer.ggml.merges": [_merge(path, each) for each in model.get("merges", ())],
        "tokenizer.ggml.eos_token_id": np.uint32(eos),
        "tokenizer.ggml.add_bos_token": False,
    }
    if bos is not None:
        found["tokenizer.ggml.bos_token_id"] = np.uint32(bos)
    if normaliser:
        found["lab.tokenizer.normalizer"] = normaliser
    return found


def _parsed(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LabError(f"{path}: no tokenizer ({error})") from None
    if not isinstance(data, dict):
        raise LabError(f"{path}: no tokenizer (expected an object)")
    return data


def _mapping(path: Path, data: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key)
    if not isinstance(value, dict):
        raise LabError(f"{path}: {key}: missing or no object")
    return value


def _pre(path: Path, data: Mapping[str, Any]) -> str:
    """The name of the pattern that splits text before byte-level BPE."""
    try:
        split, bytelevel = _mapping(path, data, "pre_tokenizer")["pretokenizers"]
        pattern = split["pattern"]["Regex"]
        plain = split["type"], split["behavior"], split["invert"], bytelevel["type"], bytelevel["add_prefix_space"], bytelevel["use_regex"]
    except (KeyError, ValueError, TypeError):
        raise LabError(f"{path}: pre_tokenizer: expected a Split by one pattern and then ByteLevel") from None
    if plain != ("Split", "Isolated", False, "ByteLevel", False, False) or pattern not in PRE_TOKENISERS:
        known = ", ".join(PRE_TOKENISERS.values())
        raise LabError(f"{path}: pre_tokenizer: llama.cpp has no pre-tokeniser with this pattern among {known}; its text would be split differently there")
    return PRE_TOKENISERS[pattern]


def _tokens(path: Path, data: Mapping[str, Any], model: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Tokens and kinds by id; ids without a token are unused, as llama.cpp's converter has them."""
    tokens, kinds = [f"[PAD{i}]" for i in range(vocab_size)], [UNUSED] * vocab_size
    try:
        entries = [(text, int(index), NORMAL) for text, index in model["vocab"].items()]
        entries += [(each["content"], int(each["id"]), CONTROL if each["special"] else USER_DEFINED) for each in data.get("added_tokens") or ()]
    except (KeyError, TypeError, AttributeError, ValueError):
        raise LabError(f"{path}: model.vocab or added_tokens: not what a tokenizer has") from None
    for text, index, kind in entries:
        if not 0 <= index < vocab_size or not isinstance(text, str):
            raise LabError(f"{path}: token id {index} does not fit the model's vocabulary of {vocab_size} rows")
        tokens[index], kinds[index] = text, kind
    return tokens, kinds


def _merge(path: Path, merge: Any) -> str:
    """Both spellings of tokenizer.json: "a b", or ["a", "b"]."""
    text = merge if isinstance(merge, str) else " ".join(merge) if isinstance(merge, list) else ""
    if text.count(" ") != 1:
        raise LabError(f"{path}: model.merges: {merge!r} is no pair of tokens")
    return text
