"""Makes golden_tokens.json: what llama.cpp's tokenizer gives for short texts, for each pre-tokeniser and vocabulary.

Run: `python -m tests.artifacts.make_golden_tokens`, with llama-cpp-python (0.3.36 was used) beside the development packages. The vocabularies are not in the
file; `tests.artifacts.gguf_models` makes the same ones again, and a digest says whether it did.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.artifacts.gguf_models import VOCABULARIES, Vocabulary, write_vocabulary

GOLDEN = Path(__file__).with_name("golden_tokens.json")

CASES = [(name, pre) for name in ("pairs", "nano") for pre in ("default", "gpt-2", "llama-bpe", "qwen2", "qwen35", "smollm")]
CASES += [("pairs", "smaug-bpe"), ("gaps", "gpt-2"), ("gaps", "qwen35")]

ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2", "starcoder": "smollm", "refact": "smollm", "command-r": "smollm"}
"""Other names of the same rules; llama.cpp is asked for them, too, and must give the same tokens."""

TEXTS = [
    "The quick brown fox can't jump; they'd say it's WE'RE O'Clock, 'tis I'LL 'Ve.",
    "  leading and trailing spaces  ",
    "1234567 3.14159 12 345,678 ²³½ Ⅷ ①②",
    "def f(x):\n\treturn  x  +\t1\n\n\n    # done\r\n  \n    if x:   pass\n",
    "中文分词，测试。日本語のカタカナと漢字 한국어 문장입니다!",
    "العَرَبِيَّةُ لغةٌ جميلة، ١٢٣",
    "हिन्दी में क्षत्रिय और ज्ञान १२३ สวัสดีครับ",
    "cafe\u0301 man\u0303ana a\u0308o\u0308u\u0308 café mañana",
    "👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 ☺️",
    "a\u00a0b\u2003c\u3000d\u2028e\u0085f\u200bg\ufeffh\u1680i",
    "\x00\x01\x04\x16\x1b[0m\x7f\x80 !\x16! \x04\x04",
    "#\x16# %\x04% (!) \x16\x16;\x16;\x04;",
    "\ufffd\ufffe \ue000 \U0010ffff \U000e0001 𝔘𝔫𝔦 𠀀",
    "<|im_start|>user\n<tool><name>hi</tool><tool> <unk></s>[PAD2565]<|endoftext|> <|im_end|>",
    "   \n  \n\n x  \ny",
    " hello hello wörld  wörld Hello_world HelloWorld __init__",
    "$x^2 + y^2 = z^2$ a<=b && c|d ~e `f` {g: [h]} <i>",
    "ſ'ſ K'K İ ı ǅ 'S'T'RE'VE'M'LL'D",
    "https://example.org/a?b=c&d=%20#e  user@example.com",
    "",
    " ",
    "\n",
]


def digest(vocabulary: Vocabulary) -> str:
    """Of everything that a tokenizer is made from."""
    return hashlib.sha256(json.dumps([vocabulary.tokens, vocabulary.types, vocabulary.merges]).encode()).hexdigest()


class LlamaTokenizer:
    """llama.cpp's tokenizer of a file, special tokens in the text recognised, none added."""

    def __init__(self, path: Path) -> None:
        import llama_cpp

        self.llama: Any = llama_cpp
        self.silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.silent, ctypes.c_void_p(0))
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        assert self.model, f"llama.cpp cannot load {path}"
        self.vocabulary = llama_cpp.llama_model_get_vocab(self.model)

    def encode(self, text: str) -> list[int]:
        """Token ids."""
        raw = text.encode()
        room = len(raw) + 8
        ids = (ctypes.c_int32 * room)()
        count = self.llama.llama_tokenize(self.vocabulary, raw, len(raw), ids, room, False, True)
        assert count >= 0, f"{count} tokens for {text!r}"
        return list(ids[:count])

    def adds_bos(self) -> bool:
        """Whether a text begins with the BOS token."""
        return bool(self.llama.llama_vocab_get_add_bos(self.vocabulary))


def main() -> None:
    """Writes the file."""
    cases = []
    with tempfile.TemporaryDirectory() as folder:

        def tokens(name: str, pre: str) -> tuple[list[list[int]], bool]:
            tokenizer = LlamaTokenizer(write_vocabulary(Path(folder) / "v.gguf", pre, VOCABULARIES[name]()))
            return [tokenizer.encode(text) for text in TEXTS], tokenizer.adds_bos()

        for name, pre in CASES:
            ids, adds_bos = tokens(name, pre)
            cases.append({"vocabulary": name, "pre": pre, "adds_bos": adds_bos, "ids": ids})
        for alias, pre in ALIASES.items():
            assert tokens("pairs", alias) == tokens("pairs", pre), f"{alias} is not {pre}"
    used = {name: digest(VOCABULARIES[name]()) for name in {name for name, _ in CASES}}
    head = {"made_by": "python -m tests.artifacts.make_golden_tokens, llama-cpp-python 0.3.36", "vocabularies": dict(sorted(used.items())), "texts": TEXTS}
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    GOLDEN.write_text(json.dumps(head, indent=1)[:-2] + f',\n "cases": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
