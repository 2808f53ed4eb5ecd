"""A GGUF file loaded by llama.cpp, and contexts on it: tokens in, logits out, every token counted.

Why so low: the high-level class of llama-cpp-python samples, caches prompts and keeps logits in its own way. Here a batch is exactly what was asked, state is
cleared when told, and the number of tokens that went through is counted twice: by these calls, and by llama.cpp itself.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from lab.engines.llama_cpp.log import Log
from lab.errors import GapError
from lab.record import Status

Ids = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]

BATCH = 512
"""n_batch and n_ubatch: tokens that go through the layers together, as many as a prefill of pp512 has."""
_CELLS = 256
"""llama.cpp rounds each sequence's part of the KV cache up to this, with a warning where it was not asked for."""
KV_TYPES = {"f32": 0, "f16": 1}
"""Types of the KV cache by name -> enum ggml_type."""
_SPLIT_NONE = 0
_FLASH = {False: 0, True: 1}
_SAID = {
    1: "no room in the KV cache for the batch",
    2: "aborted",
    -1: "invalid batch",
    -2: "could not allocate memory for the batch",
    -3: "the computation failed",
}
"""What llama_decode returns, by llama.h and llama-context.cpp."""


@dataclass(frozen=True)
class Settings:
    """How llama.cpp computes. `gpu` is the number of the GPU that takes every layer, or None for the CPU alone."""

    threads: int
    """For steps, and for prompts where those have no number of their own."""
    gpu: int | None = None
    kv: str = "f16"
    flash_attention: bool = False
    """Off unless asked for: at a depth of 512 it halved the decode rate on a CPU, and llama.cpp's own default is to choose by itself."""

    threads_batch: int | None = None
    """For prompts."""

    @property
    def prompt_threads(self) -> int:
        """What prompts are computed with."""
        return self.threads_batch or self.threads

    def details(self) -> dict[str, Any]:
        """What stands beside every number."""
        return {
            "engine": "llama_cpp",
            "threads": self.threads,
            "threads_batch": self.prompt_threads,
            "kv_type": self.kv,
            "flash_attention": "on" if self.flash_attention else "off",
            "n_batch": BATCH,
            "n_ubatch": BATCH,
        }


class LlamaModel:
    """The weights. Use as a context manager: leaving it frees them."""

    def __init__(self, lib: Any, log: Log, path: Path, settings: Settings) -> None:
        """Loads the file. Raises GapError (LOAD_FAILED) with llama.cpp's last word."""
        self.lib, self.log, self.settings = lib, log, settings
        before = len(log.lines)
        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        if settings.gpu is None:
            # An empty list of devices, ended by NULL: with a GPU in the machine, no layers on it is not yet no work for it.
            self._no_devices = (ctypes.c_void_p * 1)()
            params.devices = ctypes.cast(self._no_devices, ctypes.c_void_p)
            params.n_gpu_layers = 0
        else:
            params.n_gpu_layers, params.main_gpu = -1, settings.gpu
        params.split_mode = _SPLIT_NONE
        self.handle = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise GapError(Status.LOAD_FAILED, f"llama.cpp does not load {path.name}: {log.last_problem()}")
        self.said = log.lines[before:]
        self.vocab = lib.llama_model_get_vocab(self.handle)
        self.n_vocab = int(lib.llama_vocab_n_tokens(self.vocab))
        self.n_layer = int(lib.llama_model_n_layer(self.handle))
        self.size_bytes = int(lib.llama_model_size(self.handle))
        self.bos = int(lib.llama_vocab_bos(self.vocab)) if lib.llama_vocab_get_add_bos(self.vocab) else None
        """The token that this model's texts begin with, or None where they begin without one."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.lib.llama_model_free(self.handle)

    def value(self, key: str) -> str | None:
        """A metadata value as text, by llama.cpp's own reading of the file; None where there is none."""
        buffer = ctypes.create_string_buffer(256)
        found = self.lib.llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        return buffer.value.decode(errors="replace") if found >= 0 else None

    def tokenize(self, text: str) -> list[int]:
        """Ids of the text by llama.cpp's tokenizer: no BOS added, special tokens in the text taken as such. Raises GapError where it refuses."""
        raw = text.encode()
        room = len(raw) + 2
        out = (ctypes.c_int32 * room)()
        count = self.lib.llama_tokenize(self.vocab, raw, len(raw), out, room, False, True)
        if count < 0:
            raise GapError(Status.UNSUPPORTED, f"llama.cpp's tokenizer refuses the text (it returned {count})")
        return list(out[:count])


class Context:
    """State for `lanes` sequences of up to `capacity` tokens each. Use as a context manager.

    `evaluated` counts the tokens that llama_decode took without an error.
    """

    def __init__(self, model: LlamaModel, lanes: int, capacity: int) -> None:
        """Raises GapError (OOM) where llama.cpp cannot make it."""
        self.model, self.lanes, self.capacity = model, lanes, capacity
        self.lib = lib = model.lib
        settings, before = model.settings, len(model.log.lines)
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = lanes * -(-capacity // _CELLS) * _CELLS, lanes
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads, params.n_threads_batch = settings.threads, settings.prompt_threads
        params.flash_attn_type = _FLASH[settings.flash_attention]
        params.type_k = params.type_v = KV_TYPES[settings.kv]
        params.offload_kqv = params.op_offload = settings.gpu is not None
        self.handle = lib.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise GapError(Status.OOM, f"llama.cpp makes no context of {lanes} x {capacity} tokens: {model.log.last_problem()}")
        self.said = model.log.lines[before:]
        self.memory = lib.llama_get_memory(self.handle)
        self.batch = lib.llama_batch_init(BATCH, 0, 1)
        as_array = np.ctypeslib.as_array
        self._token, self._pos, self._wanted = (as_array(p, (BATCH,)) for p in (self.batch.token, self.batch.pos, self.batch.logits))
        as_array(self.batch.n_seq_id, (BATCH,))[:] = 1
        self.evaluated = 0
        self._singles = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.lib.llama_batch_free(self.batch)
        self.lib.llama_free(self.handle)

    def clear(self) -> None:
        """Forgets every sequence, data included."""
        self.lib.llama_memory_clear(self.memory, True)

    def length(self, lane: int) -> int:
        """Tokens in the sequence, by llama.cpp's memory and not by our count."""
        return int(self.lib.llama_memory_seq_pos_max(self.memory, lane)) + 1

    def prefill(self, ids: Ids, lane: int = 0, every: bool = False) -> Logits:
        """Appends ids [T] to a sequence, BATCH tokens at a time; logits [T, V] of every position, or [1, V] of the last. A copy."""
        start, kept = self.length(lane), []
        for first in range(0, len(ids), BATCH):
            piece = ids[first : first + BATCH]
            n = len(piece)
            self._token[:n] = piece
            self._pos[:n] = np.arange(start + first, start + first + n)
            self._wanted[:n] = every
            self._wanted[n - 1] |= first + n == len(ids)
            self._lanes([lane] * n)
            outputs = n if every else int(self._wanted[n - 1])
            found = self._decode(n, outputs)
            if outputs:
                kept.append(found.copy())
        return np.concatenate(kept)

    def step(self, ids: Ids) -> Logits:
        """Appends one token to each sequence, ids [lanes], all in one batch; logits [lanes, V], valid until the next call."""
        n = len(ids)
        self._token[:n] = ids
        self._pos[:n] = [self.length(lane) for lane in range(n)]
        self._wanted[:n] = True
        self._lanes(range(n))
        return self._decode(n, n)

    def counted(self) -> int:
        """Tokens that went through by llama.cpp's own counters. It reports a count of zero as one, hence the look at what was asked."""
        perf = self.lib.llama_perf_context(self.handle)
        return (int(perf.n_p_eval) if self.evaluated > self._singles else 0) + (int(perf.n_eval) if self._singles else 0)

    def _lanes(self, lanes: list[int] | range) -> None:
        for index, lane in enumerate(lanes):
            self.batch.seq_id[index][0] = lane

    def _decode(self, n: int, outputs: int) -> Logits:
        """Raises GapError (CRASHED) where llama.cpp says that it did not compute."""
        self.batch.n_tokens = n
        if code := self.lib.llama_decode(self.handle, self.batch):
            said = _SAID.get(code, "unknown")
            raise GapError(Status.CRASHED, f"llama_decode returned {code} for {n} tokens ({said}); the last message: {self.model.log.last_problem()}")
        self.lib.llama_synchronize(self.handle)
        self.evaluated += n
        self._singles += n == 1
        if not outputs:
            return np.empty((0, self.model.n_vocab), dtype=np.float32)
        return np.ctypeslib.as_array(self.lib.llama_get_logits(self.handle), (outputs, self.model.n_vocab))
