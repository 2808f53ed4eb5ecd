"""The tokenizer in a GGUF file's metadata as a `tokenizers.Tokenizer`: byte-level BPE that gives llama.cpp's token ids.

Why by name: a file says only which pre-tokeniser its text is split with (tokenizer.ggml.pre), not how. The expressions below are the ones that llama.cpp
(src/llama-vocab.cpp, as in llama-cpp-python 0.3.36) knows under those names; a name that is not here is refused, since a wrong split gives plausible tokens
that are not the model's.
What it does not prove: equality with the tokenizer.json the file was made from. llama.cpp normalises nothing (Qwen's tokenizer.json composes to NFC) and drops
bytes that the vocabulary lacks. Two things differ from llama.cpp: characters newer than Unicode 14 may be split elsewhere, as the libraries' tables are of
different years; and of special tokens that overlap in a text the leftmost wins, not the longest. No token is put before or after a text here; whether one
should be is in `tokenizer_facts`.
"""

from __future__ import annotations

import re
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from lab.artifacts.gguf_cursor import quoted
from lab.artifacts.gguf_metadata import Metadata

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
"""Values of tokenizer.ggml.token_type (llama.h, enum llama_token_type)."""

_ENDINGS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


def _words(letters: str, numbers: str) -> str:
    """The split that llama 3 and Qwen share, with what counts as a letter and how many digits stay together."""
    return rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{numbers}| ?[^\s{letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_LLAMA3 = (_words(r"\p{L}", r"\p{N}{1,3}"),)
_QWEN2 = (_words(r"\p{L}", r"\p{N}"),)
_DIGITS_GPT2 = (r"\p{N}", _GPT2)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")

SPLITS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    "gpt-2": (_GPT2,),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": (_words(r"\p{L}\p{M}", r"\p{N}"),),
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,
    "command-r": _DIGITS_GPT2,
}
"""tokenizer.ggml.pre -> expressions, each of which splits the pieces that the one before has left; what none matches stays a piece."""

_LLAMA3_RULES = frozenset({"llama-bpe", "llama3", "llama-v3"})
"""Names under which a piece that is a token is taken whole, without merging, and a text begins with the BOS token unless the file says otherwise."""

_ENDS = re.compile(
    r"<\|(?:eot_id|im_end|end|return|call|flush|calls|endoftext|eom_id|end_of_text)\|>|</s>|<eos>|_?<EOT>"
    r"|\[EO[TS]\]|<end_of_(?:turn|utterance)>|<｜end▁of▁sentence｜>|\[e~\["
)
"""Texts that llama.cpp takes for control tokens whatever type a file gives them."""


def tokenizer_facts(metadata: Metadata) -> dict[str, Any]:
    """{model, pre, tokens, add_bos, add_eos, bos, eos, missing_bytes}: what a report tells about the tokenizer. Raises LabError."""
    tokens = metadata.texts("tokenizer.ggml.tokens")
    pre = _pre(metadata)
    add_bos, bos = metadata.flag("tokenizer.ggml.add_bos_token", pre in _LLAMA3_RULES), _id(metadata, "bos", len(tokens))
    if add_bos and bos is None:
        raise metadata.refuse("tokenizer.ggml.add_bos_token", "is true without tokenizer.ggml.bos_token_id; the first token of a text would be a guess")
    return {
        "model": metadata.text("tokenizer.ggml.model"),
        "pre": pre,
        "tokens": len(tokens),
        "add_bos": add_bos,
        "add_eos": metadata.flag("tokenizer.ggml.add_eos_token", False),
        "bos": bos,
        "eos": _id(metadata, "eos", len(tokens)),
        "missing_bytes": len(_missing(set(tokens))),
    }


def read_tokenizer(metadata: Metadata) -> Tokenizer:
    """The tokenizer. Raises LabError in one line for a model or pre-tokeniser that is not known, and for tokens, types and merges that do not fit together."""
    split, pre = SPLITS[_pre(metadata)], metadata.text("tokenizer.ggml.pre")
    # llama.cpp names an empty token so; two of them would be one entry of the vocabulary otherwise.
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(metadata.texts("tokenizer.ggml.tokens"))]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or not tokens:
        double = next((token for i, token in enumerate(tokens) if vocabulary[token] != i), None)
        raise metadata.refuse("tokenizer.ggml.tokens", "is empty" if double is None else f"holds {quoted(double)} twice")
    types = _types(metadata, tokens)
    bpe = models.BPE(vocab=vocabulary, merges=_merges(metadata, vocabulary), ignore_merges=pre in _LLAMA3_RULES)
    tokenizer = Tokenizer(bpe)
    steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in split]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    if missing := _missing(set(vocabulary)):
        # Such a byte has no id. It goes, as in llama.cpp, and its neighbours do not merge across it.
        codes = "".join(rf"\x{{{ord(each):x}}}" for each in missing)
        steps.append(pre_tokenizers.Split(Regex(f"[{codes}]"), "removed"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types, strict=True) if k in (_UNKNOWN, _CONTROL)])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _USER_DEFINED])
    return tokenizer


def _pre(metadata: Metadata) -> str:
    model = metadata.text("tokenizer.ggml.model")
    if model != "gpt2":
        raise metadata.refuse("tokenizer.ggml.model", f"is {quoted(model)}; supported: gpt2 (byte-level BPE)")
    pre = metadata.text("tokenizer.ggml.pre")
    if pre not in SPLITS:
        raise metadata.refuse("tokenizer.ggml.pre", f"is {quoted(pre)}; known: {', '.join(SPLITS)}; another is not guessed")
    return pre


def _id(metadata: Metadata, name: str, count: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    return metadata.whole(key, least=0, most=count - 1) if key in metadata else None


def _types(metadata: Metadata, tokens: list[str]) -> list[int]:
    types = metadata.wholes("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise metadata.refuse("tokenizer.ggml.token_type", f"has {len(types)} entries for {len(tokens)} tokens")
    odd = sorted(set(types) - {_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE})
    if odd:
        raise metadata.refuse("tokenizer.ggml.token_type", f"holds {odd[0]}; known: 1 to 6")
    return [_CONTROL if _ENDS.fullmatch(token) else kind for token, kind in zip(tokens, types, strict=True)]


def _merges(metadata: Metadata, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Pairs by rank; of a pair that is there twice the first counts, as in llama.cpp."""
    found: dict[tuple[str, str], None] = {}
    for merge in metadata.texts("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise metadata.refuse("tokenizer.ggml.merges", f"holds {quoted(merge)}; expected two tokens and one space")
        unknown = next((token for token in (left, right, left + right) if token not in vocabulary), None)
        if unknown is not None:
            raise metadata.refuse("tokenizer.ggml.merges", f"holds {quoted(merge)}, but {quoted(unknown)} is no token")
        found[left, right] = None
    return list(found)


def _missing(tokens: set[str]) -> list[str]:
    """The characters of the byte alphabet that are no tokens."""
    return sorted(set(pre_tokenizers.ByteLevel.alphabet()) - tokens)
