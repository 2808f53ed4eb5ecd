"""The calls: a prepared weight that multiplies and decodes itself, and the same as functions for a single use.

Why prepared: a decode step makes some two hundred products of a few microseconds each, so that names, shapes, strides and tables are settled once per weight.
Activations stay float32 and are not quantised: a product is the float32 sum of decoded weights times activations. A row's sum is made in one fixed
order, so a result depends neither on the number of threads nor on the other vectors of the call. Nothing here is differentiable.
What it does not prove: that the product is the fastest way for hundreds of vectors; decoding once and torch's matrix product may be, depending on its library.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache, lru_cache

import torch
from torch import Tensor

from lab.codecs import Codec, Parts
from lab.errors import LabError
from lab.kernels.native import build
from lab.kernels.native.layouts import Layout, column_multiple, kind_of, layout, resolve

_PARTS = 3


class _Matrix(ctypes.Structure):
    """Mirrors `Matrix` of src/kind.h."""

    _fields_ = (
        ("part", ctypes.c_void_p * _PARTS),
        ("row_stride", ctypes.c_int64 * _PARTS),
        ("matrix_stride", ctypes.c_int64 * _PARTS),
        ("table", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("kind", ctypes.c_int32),
    )


_ONE = torch.ones(1)
"""The factor of matrices that have none."""


def unavailable() -> str | None:
    """Why there are no native kernels here, in one line; None where there are. The first call builds them (seconds), unless the cache has them."""
    if os.environ.get("LAB_NATIVE") == "0":
        return "native kernels are switched off by LAB_NATIVE=0"
    found = _library()
    return found if isinstance(found, str) else None


def library() -> ctypes.CDLL:
    """The library itself. Raises LabError where it is unavailable."""
    found = unavailable() or _library()
    if isinstance(found, str):
        raise LabError(found)
    return found


def supports(codec: Codec | str, cols: int | None = None) -> bool:
    """Whether a codec (a name means its default options) has a kernel, for rows of `cols` weights where given. Builds nothing."""
    codec = resolve(codec)
    if kind_of(codec) is None:
        return False
    return cols is None or (cols > 0 and cols % column_multiple(codec) == 0)


def prepare(codec: Codec | str, parts: Parts | Tensor, cols: int) -> Prepared:
    """A weight [..., rows, cols] ready for many calls. `parts` as the codec has them, or for GGUF the tensor of blocks uint8 [..., rows, row bytes] itself.

    They are read in place, also from a mapped file at any address and with any stride between rows; they must not be resized while this lives.
    Raises LabError where the kernels are unavailable, the codec has none, or a part's dtype, shape or device is wrong.
    """
    return Prepared(layout(resolve(codec), parts, cols))


def decode(codec: Codec | str, parts: Parts | Tensor, cols: int, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
    """Packed [..., rows, cols] -> float32 or bfloat16 of that shape, bit-equal to the codec's `decode` (rounded to bfloat16). See `Prepared.decode`."""
    return prepare(codec, parts, cols).decode(dtype, out)


def product(codec: Codec | str, parts: Parts | Tensor, x: Tensor) -> Tensor:
    """x float32 [n, cols] by packed [rows, cols] -> float32 [n, rows]. See `Prepared.__call__`."""
    return prepare(codec, parts, x.shape[-1])(x)


def expert_products(codec: Codec | str, parts: Parts | Tensor, slots: Tensor, x: Tensor) -> Tensor:
    """x float32 [s, cols], each row by its own matrix `slots[i]` (int64 [s]) of packed [E, rows, cols] -> float32 [s, rows]."""
    return prepare(codec, parts, x.shape[-1]).expert_products(slots, x)


class Prepared:
    """A packed weight, checked, with its addresses; made by `prepare`."""

    def __init__(self, found: Layout) -> None:
        """Raises LabError where the kernels are unavailable."""
        reason = unavailable()
        library = _library()
        if reason is not None or isinstance(library, str):
            raise LabError(f"{reason or library}; use lab.ops")
        self.shape = (*found.lead, found.rows, found.cols)
        self.rows, self.cols = found.rows, found.cols
        self._owners = (found.parts, found.table, _ONE)  # whose memory the addresses below point into
        self._matrix = _matrix(found, _kinds()[found.kind])
        self._address = ctypes.addressof(self._matrix)
        self._product, self._experts, self._decode = library.lab_product, library.lab_expert_products, library.lab_decode
        self._single = len(found.lead) == 0

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 [n, cols] on the CPU -> float32 [n, rows]. For any n: up to 64 vectors are multiplied while four rows are in the first-level cache.

        Raises LabError for another dtype, shape or device, and for a stack of matrices.
        """
        if x.dtype is not torch.float32 or x.ndim != 2 or x.shape[1] != self.cols or not x.is_cpu or not self._single:
            raise self._refusal(x, "n")
        x = x.contiguous()
        n = x.shape[0]
        out = torch.empty(n, self.rows)
        self._product(self._address, x.data_ptr(), n, out.data_ptr(), torch.get_num_threads())
        return out

    def expert_products(self, slots: Tensor, x: Tensor) -> Tensor:
        """x float32 [s, cols], slots int64 [s] -> float32 [s, rows]: row i by matrix slots[i] of the stack [E, rows, cols].

        Raises LabError where a slot is outside 0..E-1 (nothing is computed then), and for other dtypes, shapes or devices.
        """
        if x.dtype is not torch.float32 or x.ndim != 2 or x.shape[1] != self.cols or not x.is_cpu or len(self.shape) != 3:
            raise self._refusal(x, "s")
        if slots.dtype is not torch.int64 or slots.shape != x.shape[:1] or not slots.is_cpu:
            raise LabError(f"native product: slots must be torch.int64 [{x.shape[0]}] on the CPU, not {slots.dtype} {list(slots.shape)} on {slots.device}")
        x, slots = x.contiguous(), slots.contiguous()
        out = torch.empty(x.shape[0], self.rows)
        bad = self._experts(self._address, slots.data_ptr(), x.data_ptr(), x.shape[0], out.data_ptr(), torch.get_num_threads())
        if bad >= 0:
            raise LabError(f"native product: slot {bad} asks for expert {int(slots[bad])}; there are 0..{self.shape[0] - 1}")
        return out

    def decode(self, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
        """float32 or bfloat16 [..., rows, cols]. `out`: a contiguous CPU tensor of that dtype and shape to write into; fresh pages cost more than decoding.

        Raises LabError for another dtype and an `out` that does not fit.
        """
        if dtype not in (torch.float32, torch.bfloat16):
            raise LabError(f"native decode: dtype must be torch.float32 or torch.bfloat16, not {dtype}")
        if out is None:
            out = torch.empty(self.shape, dtype=dtype)
        elif out.dtype != dtype or tuple(out.shape) != self.shape or not out.is_cpu or not out.is_contiguous():
            raise LabError(f"native decode: out must be contiguous {dtype} {list(self.shape)} on the CPU, not {out.dtype} {list(out.shape)} on {out.device}")
        self._decode(self._address, out.data_ptr(), dtype == torch.bfloat16, torch.get_num_threads())
        return out

    def _refusal(self, x: Tensor, rows: str) -> LabError:
        return LabError(
            f"native product: weight {list(self.shape)} takes x torch.float32 [{rows}, {self.cols}] on the CPU (a stack: expert_products); "
            f"x is {x.dtype} {list(x.shape)} on {x.device}"
        )


def _matrix(found: Layout, kind: int) -> _Matrix:
    matrix = _Matrix(count=len(found.parts[0]), rows=found.rows, cols=found.cols, kind=kind)
    matrix.table = 0 if found.table is None else found.table.data_ptr()
    matrix.part[2] = _ONE.data_ptr()
    for i, part in enumerate(found.parts):
        matrix.part[i] = part.data_ptr()
        matrix.matrix_stride[i] = part.stride(0) * part.element_size()
        # A factor belongs to the whole matrix: every row reads the same.
        matrix.row_stride[i] = part.stride(1) * part.element_size() if part.shape[1] == found.rows else 0
    return matrix


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    try:
        library = build.load(build.cache_folder())
    except build.BuildError as error:
        return f"no native kernels: {error}"
    return declared(library)


def declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library with its functions' types."""
    pointer, number, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    library.lab_kind.argtypes, library.lab_kind.restype = (number, pointer), ctypes.c_char_p
    library.lab_decode.argtypes, library.lab_decode.restype = (pointer, pointer, number, number), None
    library.lab_product.argtypes, library.lab_product.restype = (pointer, pointer, long, pointer, number), None
    library.lab_expert_products.argtypes, library.lab_expert_products.restype = (pointer, pointer, pointer, long, pointer, number), long
    return library


@cache
def _kinds() -> dict[str, int]:
    """Block types by name, as the library numbers them."""
    library, facts, known = _library(), (ctypes.c_int * 3)(), dict[str, int]()
    assert not isinstance(library, str)
    while name := library.lab_kind(len(known), facts):
        known[name.decode()] = len(known)
    return known
