"""FNV-1a, 64 bits, over large data: the checksum at the end of a VQF file. In C++ where that was built (600 MB/s on one core), else in NumPy, at a
twentieth of that, where a plain loop would be ten times slower still.

How it is possible in NumPy at all: h' = (h XOR byte) * prime hangs together byte by byte, but XOR touches only the lowest 8 bits, and these evolve on their
own. Bit k of the next low byte is bit k of (low XOR byte), XOR something of its lower bits; so once those are known for a whole piece, bit k follows for all
of it by a running XOR. With the low bytes known, XOR is the addition of a known difference, and what is left is a sum of powers. Definition and constants:
Fowler, Noll and Vo, as in draft-eastlake-fnv.
What it does not prove: authenticity; the sum finds damage, not intent.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from lab.kernels.native import vqf as native

OFFSET_BASIS = 0xCBF29CE484222325
PRIME = 0x100000001B3

_MASK = (1 << 64) - 1
_PIECE = 1 << 16  # bytes; temporaries stay in a core's cache


def fnv1a(data: npt.NDArray[np.uint8], state: int = OFFSET_BASIS) -> int:
    """The hash of uint8 [n], going on from `state`."""
    found = native.fnv1a(data, state)
    return in_numpy(data, state) if found is None else found


def in_numpy(data: npt.NDArray[np.uint8], state: int = OFFSET_BASIS) -> int:
    """The same without C++."""
    for start in range(0, len(data), _PIECE):
        state = _piece(data[start : start + _PIECE], state)
    return state


def _piece(data: npt.NDArray[np.uint8], state: int) -> int:
    low_prime, low = np.uint8(PRIME & 0xFF), state & 0xFF
    mixed = np.zeros(len(data), np.uint8)  # (low byte XOR data), found bit by bit
    known = np.empty_like(mixed)
    for place in range(8):
        bit = np.uint8(1 << place)
        ours = data & bit
        turns = mixed * low_prime
        turns ^= ours
        turns &= bit  # where bit `place` of the low byte changes after this step
        turns[0] ^= low & bit
        np.bitwise_xor.accumulate(turns[:-1], out=known[1:])
        known[0] = low & bit
        known ^= ours
        mixed |= known
    change = mixed.astype(np.int64) - (mixed ^ data)  # what XOR with the byte adds to the state
    powers = _powers()[: len(data)][::-1]
    added = int(np.multiply(change.view(np.uint64), powers).sum(dtype=np.uint64))
    return (state * pow(PRIME, len(data), 1 << 64) + added) & _MASK


@cache
def _powers() -> npt.NDArray[np.uint64]:
    """PRIME ** 1, 2, ... modulo 2**64."""
    return np.cumprod(np.full(_PIECE, PRIME, np.uint64), dtype=np.uint64)
