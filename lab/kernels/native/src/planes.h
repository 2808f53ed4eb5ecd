// Products with weights in the order of lab/kernels/planes.py: 16 rows side by side, so that one vector register is one code position of 16 rows and an
// activation is broadcast to all of them. Decoding a position takes two to five instructions for 16 weights and serves every token of the call.
// Also bfloat16 rows as released. Sums are float32; each token's is made in one fixed order, whatever the other tokens.
#pragma once

#include "simd.h"

namespace lab {

typedef uint32_t Word __attribute__((vector_size(4 * kWide)));
typedef int32_t SignedWord __attribute__((vector_size(4 * kWide)));

struct Words {
  Word lane[kLanes];
};

// One matrix per expert; mirrors `_Stack` in cold.py. `words`: int32 [count, halves, blocks, bits, chunks, 16], or with 16 bits bfloat16
// [count, halves * rows, cols]. `scale`: [count, halves, blocks, groups, 16] of `scale_kind`.
struct Stack {
  const uint8_t *words, *scale;
  const float* unit;
  float levels[16];  // by code, repeated
  int64_t count, halves, rows, cols, groups, group_chunks;
  int32_t bits, scale_kind;
};

constexpr int kTokens = kWide == 16 ? 8 : kWide == 8 ? 4 : 1;  // multiplied together: their sums stay in registers
constexpr int kChains = kWide == 16 ? 2 : 1;  // sums per token, because an addition waits for the one before; the same for any number of tokens

static inline int64_t blocks_of(const Stack& s) { return (s.rows + 15) / 16; }

static inline Words load_words(const uint8_t* from) {
  Words value;
  for (int i = 0; i < kLanes; ++i) value.lane[i] = read<Word>(from + 4 * kWide * i);
  return value;
}

static inline Floats everywhere(float number) {  // as `splat`, which adds to zero and so costs an addition: 16 weights have few instructions each
  Floats value;
  for (int i = 0; i < kLanes; ++i) value.lane[i] = number - Lane{};
  return value;
}

// Entry code (its low bits; higher ones are ignored as the table repeats) of the table, by lane.
static inline Floats pick(const Words& codes, const Floats& table) {
  Floats value;
#if defined(LAB_AVX512)
  value.lane[0] = (Lane)_mm512_permutexvar_ps((__m512i)codes.lane[0], (__m512)table.lane[0]);
#elif defined(LAB_AVX2)
  for (int i = 0; i < kLanes; ++i) value.lane[i] = (Lane)_mm256_permutevar8x32_ps((__m256)table.lane[0], (__m256i)codes.lane[i]);
#else
  for (int i = 0; i < 16; ++i) {
    const uint32_t code = codes.lane[i / kWide][i % kWide] & 15;
    value.lane[i / kWide][i % kWide] = table.lane[code / kWide][code % kWide];
  }
#endif
  return value;
}

static inline Floats e4m3s(const uint8_t* from) {  // as E4M3Scale in lab.cpp: exponent bias 7, 0x7F is NaN
  Floats value;
  for (int i = 0; i < kLanes; ++i) {
    Word bits;
#if defined(LAB_AVX512)
    bits = (Word)_mm512_cvtepu8_epi32((__m128i)load_bytes(from));
#elif defined(LAB_AVX2)
    bits = (Word)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)read<uint64_t>(from + 8 * i)));
#else
    for (int j = 0; j < kWide; ++j) bits[j] = from[i * kWide + j];
#endif
    const Word rest = bits & 127;
    const Lane magnitude = (Lane)(rest << 20) * 0x1p120f;
    const Word nan = (Word)(rest == 127);
    value.lane[i] = (Lane)(((nan & 0x7FC00000u) | (~nan & (Word)magnitude)) | (bits & 128) << 24);
  }
  return value;
}

static inline Floats scales(const Stack& s, int64_t at) {  // sixteen, from element `at` of the plane
  switch (s.scale_kind) {
    case 0: return e4m3s(s.scale + at);
    case 1: return halves(s.scale + 2 * at);
    case 2: return brains(s.scale + 2 * at);
    default: return load((const float*)s.scale + at);
  }
}

// Within half a chunk, positions 8 s .. 8 s + 7 lie in nibbles shifted by 2 s; position i of the eight in this one (`code_bits` of planes.py).
constexpr int nibble(int i) { return 4 * (i / 4) + i / 2 % 2 + 2 * (i % 2); }

// Eight codes of step `step` in nibbles: two low bits, and of three-bit codes the third above them. What else is in a nibble is ignored by `pick`.
template <int half, int step, int bits>
static inline Words nibbles(const Words& low, const Words& high) {
  Words codes;
  for (int n = 0; n < kLanes; ++n) {
    codes.lane[n] = low.lane[n] >> 2 * step;
    if constexpr (bits == 3) {
      constexpr int at = 2 * half + step;  // the third bit's place in its nibble
      const Word third = at < 2 ? high.lane[n] << (at < 2 ? 2 - at : 0) : high.lane[n] >> (at < 2 ? 0 : at - 2);
#if defined(LAB_AVX512)
      codes.lane[n] = (Word)_mm512_ternarylogic_epi32(_mm512_set1_epi32(0x33333333), (__m512i)codes.lane[n], (__m512i)third, 0xCA);  // by the first
#else
      codes.lane[n] = (codes.lane[n] & 0x33333333u) | (third & 0xCCCCCCCCu);
#endif
    }
  }
  return codes;
}

// part[t] += eight weights of 16 rows times x[t][at .. at + 8).
template <int tokens>
static inline void eight(const Words& codes, const Floats& table, const float* const* x, int64_t at, Floats (*part)[kChains]) {
  LAB_UNROLL for (int i = 0; i < 8; ++i) {
    Words code;
    for (int n = 0; n < kLanes; ++n) code.lane[n] = codes.lane[n] >> 4 * nibble(i);
    const Floats weight = pick(code, table);
    LAB_UNROLL for (int t = 0; t < tokens; ++t) part[t][i % kChains] = fma(weight, everywhere(x[t][at + i]), part[t][i % kChains]);
  }
}

template <int tokens>
static inline void bytes_of(const Words& word, const float* const* x, int64_t at, Floats (*part)[kChains]) {
  LAB_UNROLL for (int i = 0; i < 4; ++i) {
    Floats weight;
    for (int n = 0; n < kLanes; ++n)
      weight.lane[n] = __builtin_convertvector((SignedWord)((word.lane[n] ^ 0x80808080u) << (24 - 8 * i)) >> 24, Lane);
    LAB_UNROLL for (int t = 0; t < tokens; ++t) part[t][i % kChains] = fma(weight, everywhere(x[t][at + i]), part[t][i % kChains]);
  }
}

// out[t] = 16 rows of block `block` (numbered over experts and halves) times x[t][0 .. cols), without the expert's unit. The bytes of block `next`, which
// will be read after this one, are asked for on the way: runs are too short for hardware prefetchers, and their first lines cost a memory latency each.
template <int bits, int tokens>
void plane_block(const Stack& s, int64_t block, int64_t next, const float* const* x, Floats* out) {
  const int64_t chunks = s.cols / 32, plane = 64 * chunks;
  const uint8_t* const words = s.words + block * bits * plane;
  const int64_t ahead = (next - block) * bits * plane;
  const Floats table = load(s.levels);
  Floats sum[tokens];
  for (int t = 0; t < tokens; ++t) sum[t] = splat(0.0f);
  for (int64_t g = 0, c = 0; g < s.groups; ++g) {
    Floats part[tokens][kChains];
    for (int t = 0; t < tokens; ++t)
      for (int k = 0; k < kChains; ++k) part[t][k] = splat(0.0f);
    for (const int64_t end = c + s.group_chunks < chunks ? c + s.group_chunks : chunks; c < end; ++c) {
      const uint8_t* const word = words + 64 * c;
      for (int p = 0; p < bits; ++p) __builtin_prefetch((const void*)((uintptr_t)word + p * plane + ahead));
      if constexpr (bits == 8) {
        for (int p = 0; p < 8; ++p) bytes_of<tokens>(load_words(word + p * plane), x, 32 * c + 4 * p, part);
      } else {
        const Words high = load_words(word + (bits - 1) * plane);
        const Words first = load_words(word), second = load_words(word + plane);
        eight<tokens>(nibbles<0, 0, bits>(first, high), table, x, 32 * c, part);
        eight<tokens>(nibbles<0, 1, bits>(first, high), table, x, 32 * c + 8, part);
        eight<tokens>(nibbles<1, 0, bits>(second, high), table, x, 32 * c + 16, part);
        eight<tokens>(nibbles<1, 1, bits>(second, high), table, x, 32 * c + 24, part);
      }
    }
    Floats scale = scales(s, (block * s.groups + g) * 16);
    if constexpr (bits == 8) scale = scale * s.levels[0];  // a code counts in 128ths
    for (int t = 0; t < tokens; ++t) {
      for (int k = 1; k < kChains; ++k)
        for (int n = 0; n < kLanes; ++n) part[t][0].lane[n] += part[t][k].lane[n];
      sum[t] = fma(part[t][0], scale, sum[t]);
    }
  }
  for (int t = 0; t < tokens; ++t) out[t] = sum[t];
}

// The same for bfloat16 rows; rows beyond the last are zero.
template <int tokens>
void brain_block(const Stack& s, int64_t expert, int64_t half, int64_t block, const float* const* x, Floats* out) {
  float found[tokens][16] = {};
  for (int64_t r = 0; r < 16 && block * 16 + r < s.rows; ++r) {
    const uint8_t* const row = s.words + 2 * ((expert * s.halves + half) * s.rows + block * 16 + r) * s.cols;
    Floats part[tokens];
    for (int t = 0; t < tokens; ++t) part[t] = splat(0.0f);
    int64_t i = 0;
    for (; i + 16 <= s.cols; i += 16) {
      const Floats weight = brains(row + 2 * i);
      for (int t = 0; t < tokens; ++t) part[t] = fma(weight, load(x[t] + i), part[t]);
    }
    for (int t = 0; t < tokens; ++t) {
      found[t][r] = total(part[t]);
      for (int64_t k = i; k < s.cols; ++k) found[t][r] += brain(row + 2 * k) * x[t][k];
    }
  }
  for (int t = 0; t < tokens; ++t) out[t] = load(found[t]);
}

template <int tokens>
void block_of(const Stack& s, int64_t expert, int64_t half, int64_t block, int64_t next, const float* const* x, Floats* out) {
  const int64_t number = (expert * s.halves + half) * blocks_of(s) + block;
  switch (s.bits) {
    case 2: return plane_block<2, tokens>(s, number, next, x, out);
    case 3: return plane_block<3, tokens>(s, number, next, x, out);
    case 8: return plane_block<8, tokens>(s, number, next, x, out);
    default: return brain_block<tokens>(s, expert, half, block, x, out);
  }
}

// `next`: as of `plane_block`. Up to kTokens tokens: the smallest of 1, 2, 4 and 8 places that holds them. The other places repeat the first token, and their sums are not read.
template <int places = 1>
static inline void some_block(int tokens, const Stack& s, int64_t expert, int64_t half, int64_t block, int64_t next, const float* const* x, Floats* out) {
  if constexpr (places < kTokens)
    if (tokens > places) return some_block<2 * places>(tokens, s, expert, half, block, next, x, out);
  const float* filled[places];
  for (int t = 0; t < places; ++t) filled[t] = x[t < tokens ? t : 0];
  block_of<places>(s, expert, half, block, next, filled, out);
}

}  // namespace lab
