"""A module that answers like llama-cpp-python's low-level interface, with a language model of two tables, and faults to order.

Logits depend on the last two tokens of a sequence, so that a token at a wrong place, in a wrong lane or left from an earlier text shows. Counts, places and
log lines have the form that llama.cpp gives them.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from lab.artifacts.gguf import open_gguf

DEBUG, INFO, WARN, ERROR, CONTINUED = 1, 2, 3, 4, 5
_SPREAD, _LIKELY, _ALPHABET = 1.0, 4.0, "abcdefghijklmĠ"
_STEP_S = 0.0004
"""A call takes at least this long, so that four tokens in one are faster than four calls."""


class Batch(ctypes.Structure):
    """struct llama_batch of llama.h."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


@dataclass
class Faults:
    """What goes wrong. `places` maps layers to devices other than the CPU; `gpu` adds a GPU to the build."""

    gpu: bool = False
    places: dict[int, str] = field(default_factory=dict)
    silent_places: bool = False
    load: str = ""
    context: str = ""
    code: int = 0
    nan_batches: bool = False
    wrong_batches: bool = False
    miscount: int = 0
    vocabulary: int = 0
    architecture: str = ""
    other_tokens: bool = False
    other_file: bool = False


class FakeLlama:
    """The module. `weights` [2, V, V] are the tables; `decoded` are the sizes of all batches."""

    __version__ = "0.0.fake"

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.decoded: list[int] = []
        self.alive = 0
        self._log: Any = None

    def modules(self) -> dict[str, Any]:
        """What goes into sys.modules."""
        names = ["CPU", "CUDA0"] if self.faults.gpu else ["CPU"]
        ggml = SimpleNamespace(
            ggml_backend_dev_count=lambda: len(names),
            ggml_backend_dev_get=lambda index: index.value + 1,
            ggml_backend_dev_name=lambda device: names[device.value - 1].encode(),
            ggml_backend_dev_description=lambda device: b"made up",
            ggml_backend_dev_type=lambda device: device.value - 1,
            ggml_commit=lambda: b"abc123",
        )
        return {"llama_cpp": self, "llama_cpp._ggml": SimpleNamespace(libggml=ggml)}

    def say(self, level: int, *parts: str) -> None:
        """One line of log, its parts in calls of their own."""
        for number, part in enumerate(parts):
            self._log(level if number == 0 else CONTINUED, part.encode(), None)

    # The build.
    def llama_log_callback(self, function: Any) -> Any:
        return function

    def llama_log_set(self, callback: Any, _data: Any) -> None:
        self._log = callback

    def llama_backend_init(self) -> None: ...

    def llama_version(self) -> bytes:
        return b"0.0-fake"

    def llama_print_system_info(self) -> bytes:
        return b"CPU : FAKE = 1 | "

    def llama_supports_gpu_offload(self) -> bool:
        return self.faults.gpu

    # The model.
    def llama_model_default_params(self) -> Any:
        return SimpleNamespace(devices=None, n_gpu_layers=-1, main_gpu=0, split_mode=1)

    def llama_model_load_from_file(self, raw: bytes, params: Any) -> Any:
        path, faults = Path(raw.decode()), self.faults
        if faults.load:
            self.say(ERROR, f"llama_model_load: error loading model: {faults.load}\n")
            self.say(INFO, "llama_model_load_from_file_impl: failed to load model\n")
            return None
        gguf = open_gguf(path)
        arch = str(gguf.metadata["general.architecture"])
        layers = int(gguf.metadata[f"{arch}.block_count"])  # type: ignore[arg-type]
        tokens = list(gguf.metadata["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
        shown = path.with_name("other.gguf") if faults.other_file else path
        self.say(INFO, f"llama_model_loader: loaded meta data with 3 key-value pairs and {len(gguf.tensors)} tensors from {shown} (version GGUF V3 (latest))\n")
        for layer in range(0 if faults.silent_places else layers + 1):
            device = faults.places.get(layer, "CUDA0" if params.n_gpu_layers else "CPU")
            self.say(DEBUG, f"load_tensors: layer {layer:3d} assigned to ", f"device {device}, is_swa = 0\n")
        self.say(INFO, "load_tensors:   CPU_Mapped model buffer size =     1.50 MiB\n")
        if self.faults.gpu and params.n_gpu_layers:
            self.say(INFO, "load_tensors:        CUDA0 model buffer size =     2.00 MiB\n")
            self.say(INFO, f"load_tensors: offloaded {layers + 1}/{layers + 1} layers to GPU\n")
        self.alive += 1
        draw = np.random.default_rng(5)
        size = len(tokens) + faults.vocabulary
        self.weights = (_SPREAD * draw.normal(size=(2, size, size))).astype(np.float32)
        self.weights[0][:, [i for i, token in enumerate(tokens) if token in _ALPHABET]] += _LIKELY  # better than guessing
        nbytes = sum(tensor.nbytes for tensor in gguf.tensors.values())
        return SimpleNamespace(
            arch=faults.architecture or arch, layers=layers, size=nbytes, tokens=tokens, gguf=gguf, gpu=bool(params.n_gpu_layers), params=params
        )

    def llama_model_free(self, _model: Any) -> None:
        self.alive -= 1

    def llama_model_get_vocab(self, model: Any) -> Any:
        return model

    def llama_vocab_n_tokens(self, _vocab: Any) -> int:
        return self.weights.shape[1]

    def llama_vocab_bos(self, vocab: Any) -> int:
        return int(vocab.gguf.metadata["tokenizer.ggml.bos_token_id"])

    def llama_vocab_get_add_bos(self, vocab: Any) -> bool:
        return bool(vocab.gguf.metadata.get("tokenizer.ggml.add_bos_token", False))

    def llama_model_n_layer(self, model: Any) -> int:
        return int(model.layers)

    def llama_model_size(self, model: Any) -> int:
        return int(model.size)

    def llama_model_meta_val_str(self, model: Any, key: bytes, buffer: Any, _size: int) -> int:
        if key != b"general.architecture":
            return -1
        buffer.value = model.arch.encode()
        return len(model.arch)

    def llama_tokenize(self, vocab: Any, raw: bytes, _length: int, out: Any, room: int, special: bool, parse: bool) -> int:
        """By bytes, which is what the small vocabulary does with words that no merge is in."""
        assert (special, parse) == (False, True)
        ids = [vocab.tokens.index("Ġ" if character == " " else character) for character in raw.decode()]
        if self.faults.other_tokens:
            ids[7:8] = [1, 2]
        assert len(ids) <= room
        out[: len(ids)] = ids
        return len(ids)

    # The context.
    def llama_context_default_params(self) -> Any:
        return SimpleNamespace(n_ctx=512, n_seq_max=1, n_batch=2048, n_ubatch=512, flash_attn_type=-1, type_k=1, type_v=1)

    def llama_init_from_model(self, model: Any, params: Any) -> Any:
        if self.faults.context and params.n_seq_max > 1:
            self.say(ERROR, f"llama_init_from_model: failed to initialize the context: {self.faults.context}\n")
            return None
        self.say(INFO, f"llama_context: flash_attn            = {'disabled' if params.flash_attn_type == 0 else 'auto'}\n")
        device = "CUDA0" if model.gpu and params.offload_kqv else "CPU"
        for layer in range(model.layers):
            self.say(DEBUG, f"llama_kv_cache: layer {layer:3d}: dev = {device}\n")
        self.say(INFO, f"llama_kv_cache: {device:>10} KV buffer size = {params.n_seq_max:8.2f} MiB\n")
        self.alive += 1
        return SimpleNamespace(params=params, model=model, lanes=[[] for _ in range(params.n_seq_max)], n_p_eval=0, n_eval=0, logits=None)

    def llama_free(self, _context: Any) -> None:
        self.alive -= 1

    def llama_get_memory(self, context: Any) -> Any:
        return context

    def llama_memory_clear(self, context: Any, data: bool) -> None:
        assert data
        for lane in context.lanes:
            lane.clear()

    def llama_memory_seq_pos_max(self, context: Any, lane: int) -> int:
        return len(context.lanes[lane]) - 1

    def llama_batch_init(self, size: int, embd: int, lanes: int) -> Batch:
        assert embd == 0
        ids = [(ctypes.c_int32 * lanes)() for _ in range(size)]
        batch = Batch(token=(ctypes.c_int32 * size)(), pos=(ctypes.c_int32 * size)(), n_seq_id=(ctypes.c_int32 * size)(), logits=(ctypes.c_int8 * size)())
        batch.seq_id = (ctypes.POINTER(ctypes.c_int32) * size)(*(ctypes.cast(each, ctypes.POINTER(ctypes.c_int32)) for each in ids))
        batch.kept = ids
        return batch

    def llama_batch_free(self, _batch: Batch) -> None: ...

    def llama_decode(self, context: Any, batch: Batch) -> int:
        n = batch.n_tokens
        if self.faults.code and n == 1:
            self.say(WARN, "decode: failed to find a memory slot\n")
            return self.faults.code
        assert n <= context.params.n_batch
        started = time.perf_counter()
        rows: list[npt.NDArray[np.float32]] = []
        for i in range(n):
            lane = context.lanes[batch.seq_id[i][0]]
            assert batch.n_seq_id[i] == 1
            assert batch.pos[i] == len(lane) < context.params.n_ctx // context.params.n_seq_max
            lane.append(batch.token[i])
            if batch.logits[i]:
                rows.append(self.row(lane, n))
        context.logits = np.stack(rows) if rows else None
        self.decoded.append(n)
        counted = n + (self.faults.miscount if len(self.decoded) == 1 else 0)
        if n == 1:
            context.n_eval += counted
        else:
            context.n_p_eval += counted
        while time.perf_counter() - started < _STEP_S:
            pass
        return 0

    def row(self, lane: list[int], n: int) -> npt.NDArray[np.float32]:
        """Logits after these tokens, in a batch of n."""
        found: npt.NDArray[np.float32] = self.weights[0, lane[-1]] + (0.5 * self.weights[1, lane[-2]] if len(lane) > 1 else 0.0)
        if n > 1 and self.faults.nan_batches:
            found = found * np.float32("nan")
        return found[::-1] if n > 8 and self.faults.wrong_batches else found

    def llama_synchronize(self, _context: Any) -> None: ...

    def llama_get_logits(self, context: Any) -> Any:
        return context.logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def llama_perf_context(self, context: Any) -> Any:
        """Zero is reported as one, as llama.cpp does."""
        return SimpleNamespace(n_p_eval=max(1, context.n_p_eval), n_eval=max(1, context.n_eval))
