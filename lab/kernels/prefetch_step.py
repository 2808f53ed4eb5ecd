"""Asks for weights that a later kernel will read, so that they lie in the second-level cache by then. NVIDIA only; elsewhere nothing happens.

Why: at one token most launches of a step wait for latencies while the memory is idle, and which trunk weights come next is known. A launch beside the
step's own chain touches their lines (`prefetch.global.L2`, PTX ISA) and needs no registers for them.
What it does not prove: that they are still in the cache when they are read; too much at once drives out what is needed first.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton.language as tl
from torch import Tensor

from lab.kernels.backend import jit, use_ptx

_PROGRAMS, _LANES = 64, 256
_REGIONS = 4


@jit
def _touch(pointer: tl.tensor, nbytes: tl.tensor, PROGRAMS: tl.constexpr, LANES: tl.constexpr) -> None:
    """Lines of one region, LANES at a time, the programs in turn."""
    base = pointer.to(tl.int64)
    for start in range(tl.program_id(0) * LANES, (nbytes + 127) // 128, PROGRAMS * LANES):
        line = start + tl.arange(0, LANES)
        address = base + tl.minimum(line.to(tl.int64) * 128, nbytes - 1)
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1)


@jit
def _prefetch_kernel(
    a_ptr: tl.tensor, b_ptr: tl.tensor, c_ptr: tl.tensor, d_ptr: tl.tensor, a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor,
    PROGRAMS: tl.constexpr, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """Touches four regions in order; sizes in bytes, 0 for none."""
    _touch(a_ptr, a, PROGRAMS, LANES)
    _touch(b_ptr, b, PROGRAMS, LANES)
    _touch(c_ptr, c, PROGRAMS, LANES)
    _touch(d_ptr, d, PROGRAMS, LANES)


def prefetch(regions: Sequence[tuple[Tensor, int]]) -> None:
    """Asks for the first n bytes of each (contiguous tensor, n), at most four. Returns at once; does nothing where there is no such instruction."""
    if not regions or not use_ptx():
        return
    padded = [*regions[:_REGIONS], *[(regions[0][0], 0)] * (_REGIONS - len(regions[:_REGIONS]))]
    _prefetch_kernel[(_PROGRAMS,)](*(t for t, _ in padded), *(min(n, t.nbytes) for t, n in padded), _PROGRAMS, _LANES, num_warps=_LANES // 32)
