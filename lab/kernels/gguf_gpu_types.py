"""Which levels, groups and scales each GGUF block type has, as the GPU kernels need to know them: one table.

Why a table: every block type is weight = level(code) * scale (+ offset), and one kernel can serve all of them once it is told how many bits a code
has, which levels the codes mean and how scales are kept. Levels are facts of ggml (see `lab.codecs.gguf_simple`, `gguf_k`, `gguf_grid`).
What it does not prove: itself; transcoding refuses a level that is not listed, and tests compare all types with the codec.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lab.codecs.gguf_simple import IQ4_LEVELS, Q2_0_LEVELS


@dataclass(frozen=True)
class BlockSpec:
    """One block type.

    levels: ascending, by code. group: weights per scale. scale: dtype that holds every scale of the type exactly. supers: where a block keeps the
    float16 that all its small scales (and, second, its small minima) are multiplied by; -1 for the scattered one of IQ1_M; empty: one scale per group.
    per_super: groups under one of these. unit: what a small scale of 1 stands for, a power of two.
    """

    bits: int
    levels: tuple[int, ...]
    group: int
    scale: torch.dtype = torch.float16
    offset: bool = False
    supers: tuple[int, ...] = ()
    unit: float = 1.0

    @property
    def step(self) -> int:
        """Distance of the levels, a power of two; 0 where they are uneven and a table of 16 gives them."""
        step = self.levels[1] - self.levels[0]
        return step if self.levels == tuple(range(self.levels[0], self.levels[-1] + 1, step)) else 0

    @property
    def per_super(self) -> int:
        """Groups that share one large scale: those of a block of 256; 0 where scales have one stage."""
        return 256 // self.group if self.supers else 0


def _both_signs(*magnitudes: int) -> tuple[int, ...]:
    return (*(-m for m in reversed(magnitudes)), *magnitudes)


_E2M1 = tuple(sorted({*_both_signs(1, 2, 3, 4, 6, 8, 12), 0}))  # doubled, as in gguf_simple; both zeros are one level
_IQ2 = _both_signs(8, 25, 43)
_IQ1 = _both_signs(1, 7, 9)  # eighths

SPECS: dict[str, BlockSpec] = {
    "Q1_0": BlockSpec(1, (-1, 1), 128),
    "Q2_0": BlockSpec(2, Q2_0_LEVELS, 64),
    "Q2_0_G128": BlockSpec(2, Q2_0_LEVELS, 128),
    "Q4_0": BlockSpec(4, tuple(range(-8, 8)), 32),
    "Q4_1": BlockSpec(4, tuple(range(16)), 32, offset=True),
    "Q5_0": BlockSpec(8, tuple(range(-16, 16)), 32),
    "Q5_1": BlockSpec(8, tuple(range(32)), 32, offset=True),
    "Q8_0": BlockSpec(8, tuple(range(-128, 128)), 32),
    "Q2_K": BlockSpec(2, tuple(range(4)), 16, offset=True, supers=(80, 82)),
    "Q3_K": BlockSpec(4, tuple(range(-4, 4)), 16, supers=(108,)),
    "Q4_K": BlockSpec(4, tuple(range(16)), 32, offset=True, supers=(0, 2)),
    "Q5_K": BlockSpec(8, tuple(range(32)), 32, offset=True, supers=(0, 2)),
    "Q6_K": BlockSpec(8, tuple(range(-32, 32)), 16, supers=(208,)),
    "IQ1_S": BlockSpec(4, _IQ1, 32, supers=(0,), unit=0.125),
    "IQ1_M": BlockSpec(4, _IQ1, 16, supers=(-1,), unit=0.125),
    "IQ2_XXS": BlockSpec(4, _IQ2, 32, supers=(0,), unit=0.125),
    "IQ2_XS": BlockSpec(4, _IQ2, 16, supers=(0,), unit=0.125),
    "IQ2_S": BlockSpec(4, _IQ2, 16, supers=(0,), unit=0.125),
    "IQ3_XXS": BlockSpec(4, _both_signs(4, 12, 20, 28, 36, 44, 52, 62), 32, supers=(0,), unit=0.25),
    "IQ3_S": BlockSpec(4, _both_signs(1, 3, 5, 7, 9, 11, 13, 15), 32, supers=(0,)),
    "IQ4_NL": BlockSpec(4, IQ4_LEVELS, 32),
    "IQ4_XS": BlockSpec(4, IQ4_LEVELS, 32, supers=(0,)),
    "MXFP4": BlockSpec(4, _E2M1, 32, scale=torch.bfloat16),  # powers of two down to 2^-128: beyond float16, exact in bfloat16
    "NVFP4": BlockSpec(4, _E2M1, 16),
}
"""By type name. F32, F16 and BF16 are not here: they stay as they are."""
