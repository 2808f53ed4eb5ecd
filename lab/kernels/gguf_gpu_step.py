"""One step of a product over transcoded GGUF blocks inside a kernel: asking for words, scales and activations, and adding their products.

Why two halves: the compiler keeps loads in the order they are written and waits at the first use, so a kernel asks for everything that several steps need
and only then computes; at one token the wait for memory is most of the time. What it does not prove: the best depth, which the launch shape says.
"""

from __future__ import annotations

import triton.language as tl

from lab.kernels.backend import jit
from lab.kernels.gguf_gpu_weight import decoded, level_factors, weight_at


@jit
def load_group(
    scale_ptr: tl.tensor, small_ptr: tl.tensor, offset_ptr: tl.tensor, small_offset_ptr: tl.tensor, group: tl.tensor, mask: tl.tensor,
    PER_SUPER: tl.constexpr, OFFSET: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """(scale, small scale, offset, small offset) of each place as stored; those that the type lacks repeat the scale. Pointers point to group 0 of the right
    row, groups lie 8 apart. Apart from `group_factors`, so that all loads of several steps come before the first use of one."""
    place = group // PER_SUPER if PER_SUPER > 0 else group
    scale = tl.load(scale_ptr + place * 8, mask=mask, other=0)
    small, offset, small_offset = scale, scale, scale
    if PER_SUPER > 0:
        small = tl.load(small_ptr + group * 8, mask=mask, other=0)
    if OFFSET:
        offset = tl.load(offset_ptr + place * 8, mask=mask, other=0)
        if PER_SUPER > 0:
            small_offset = tl.load(small_offset_ptr + group * 8, mask=mask, other=0)
    return scale, small, offset, small_offset


@jit
def group_factors(stored: tl.tensor, PER_SUPER: tl.constexpr, OFFSET: tl.constexpr, UNIT: tl.constexpr) -> tl.tensor:
    """What `load_group` gave -> (scale, offset) as float32."""
    scale = stored[0].to(tl.float32)
    offset = tl.zeros_like(scale)
    if OFFSET:
        offset = stored[2].to(tl.float32)
    if PER_SUPER > 0:
        scale = scale * (stored[1].to(tl.float32) * UNIT)
        if OFFSET:
            offset = -(offset * stored[3].to(tl.float32))
    return scale, offset


@jit
def load_run(pointer: tl.tensor, mask: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    """COUNT numbers that follow each other from each pointer, as a tuple."""
    run = (tl.load(pointer, mask=mask, other=0),)
    for place in tl.static_range(1, COUNT):
        run = run + (tl.load(pointer + place, mask=mask, other=0),)  # type: ignore[assignment]  # noqa: RUF005 (unknown to Triton)
    return run


@jit
def activation(packed: tl.tensor, PLACE: tl.constexpr, KIND: tl.constexpr) -> tl.tensor:
    """One of the activations in an int64 as float32. KIND: 0 two float32, 1 four float16, 2 four bfloat16."""
    if KIND == 0:
        return (packed >> (32 * PLACE)).to(tl.int32).to(tl.float32, bitcast=True)
    bits = (packed >> (16 * PLACE)).to(tl.int32)
    if KIND == 1:
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return (bits << 16).to(tl.float32, bitcast=True)


@jit
def add_products(
    total: tl.tensor, words: tl.tensor, first_x: tl.tensor, stored: tl.tensor, x_ptr: tl.tensor, word: tl.tensor, table_ptr: tl.tensor, tables: tl.tensor,
    tokens: tl.tensor, M: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr, PER_SUPER: tl.constexpr, OFFSET: tl.constexpr, FIRST: tl.constexpr,
    LEVEL_STEP: tl.constexpr, UNIT: tl.constexpr, KIND: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr, PTX: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A tuple of M sums float32 [words, rows] plus the products of STEPS steps. words, first_x (token 0's activations, int64) and stored scales: one per step,
    as asked for; `word` numbers the first step's words. The other tokens' activations are loaded here."""
    per_quad: tl.constexpr = 2 if KIND == 0 else 4
    run: tl.constexpr = 32 // BITS // per_quad
    codes, factors = (), ()
    for step in tl.static_range(STEPS):
        codes = codes + (decoded(words[step], tables[0], tables[1], tables[2], tables[3], BITS, LEVEL_STEP == 0, PTX),)  # type: ignore[assignment]  # noqa: RUF005 (unknown to Triton)
        by_level = group_factors(stored[step], PER_SUPER, OFFSET, UNIT)
        factors = factors + (level_factors(by_level[0], by_level[1], BITS, FIRST, LEVEL_STEP),)  # type: ignore[assignment]  # noqa: RUF005
    for quad in tl.static_range(run):
        packed = ()
        for step in tl.static_range(STEPS):
            packed = packed + (first_x[step][quad],)  # type: ignore[assignment]  # noqa: RUF005
            for m in tl.static_range(1, M):
                place_of = x_ptr + (word + step * TILE) * run + (m * WORDS * run + quad)
                packed = packed + (tl.load(place_of, mask=((word + step * TILE < WORDS) & (m < tokens)) != 0, other=0),)  # type: ignore[assignment]  # noqa: RUF005
        for place in tl.static_range(per_quad):
            # Steps inside places: each sum then needs every step's words at its first additions, which keeps the compiler from moving the later steps' loads
            # behind the first step's work, as it does in the other order (seen in the machine code).
            for step in tl.static_range(STEPS):
                weight = weight_at(codes[step], table_ptr, factors[step][0], factors[step][1], quad * per_quad + place, BITS, LEVEL_STEP == 0, PTX)
                grown = ()
                for m in tl.static_range(M):
                    grown = grown + (tl.fma(weight, activation(packed[step * M + m], place, KIND), total[m]),)  # type: ignore[assignment]  # noqa: RUF005
                total = grown
    return total


@jit
def token_sums(total: tl.tensor, M: tl.constexpr) -> tl.tensor:
    """A tuple of M = 1, 2, 4 or 8 tensors [words, rows] -> their sums over words, [rows, M]. Joined first: one exchange between warps instead of M."""
    joined = total[0]
    if M == 2:
        joined = tl.join(total[0], total[1])
    elif M == 4:
        joined = tl.join(tl.join(total[0], total[2]), tl.join(total[1], total[3]))
    elif M == 8:
        even = tl.join(tl.join(total[0], total[4]), tl.join(total[2], total[6]))
        joined = tl.join(even, tl.join(tl.join(total[1], total[5]), tl.join(total[3], total[7])))
    return tl.sum(joined, axis=0).reshape([total[0].shape[1], M])
