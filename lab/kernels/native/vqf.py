"""The blocks and the checksum of VQF files in C++ (src/vqf.cpp): what `lab.codecs.vqf_encode` and `lab.artifacts.vqf_fnv` do in torch and NumPy, bit for bit.

Why: converting an 8B model spends most of its time in these two. Where there is no compiler the callers go on with their own code, which is the reference.
What it does not prove: anything about bytes; tests compare both.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lab.kernels.native import calls

KINDS = {"Q8_0": 0, "G256": 1, "Q4_0": 2, "Q4I": 3, "F16": 4}
"""Plain types with an encoder, as src/vqf.cpp numbers them."""
_BLOCK_BYTES = {"Q8_0": (32, 34), "G256": (32, 34), "Q4_0": (32, 18), "Q4I": (32, 34), "F16": (1, 2)}


def encode(plain: str, rows: Tensor) -> Tensor | None:
    """float32 [n, cols], finite, cols a multiple of the type's block (G256: 256) -> uint8 [n, bytes a row]; None where there is no native encoder for it."""
    if plain not in KINDS or not rows.is_cpu or calls.unavailable() is not None:
        return None
    rows = rows.contiguous()
    weights, nbytes = _BLOCK_BYTES[plain]
    out = torch.empty(len(rows), rows.shape[1] // weights * nbytes, dtype=torch.uint8)
    _library().lab_vqf_encode(KINDS[plain], rows.data_ptr(), *rows.shape, out.shape[1], out.data_ptr(), torch.get_num_threads())
    return out


def fnv1a(data: npt.NDArray[np.uint8], state: int) -> int | None:
    """The hash of uint8 [n], going on from `state`; None where there are no native kernels."""
    if calls.unavailable() is not None:
        return None
    data = np.ascontiguousarray(data)
    return int(_library().lab_fnv1a(data.ctypes.data, len(data), state))


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    """The library with these functions' types."""
    library = calls.library()
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    library.lab_vqf_encode.argtypes, library.lab_vqf_encode.restype = (ctypes.c_int, pointer, long, long, long, pointer, ctypes.c_int), None
    library.lab_fnv1a.argtypes, library.lab_fnv1a.restype = (pointer, long, ctypes.c_uint64), ctypes.c_uint64
    return library
