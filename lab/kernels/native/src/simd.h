// Sixteen numbers at a time: the few vector operations that block layouts and products are written in.
//
// Why sixteen: every group of every block type is a multiple of 16 weights. `Floats` is one AVX-512 register, two of AVX2, or four of 128 bits.
// Each operation has a branch in plain C++ with compiler vectors, which any CPU runs; LAB_PLAIN selects it everywhere, and the tests run both.
// Only `fma` may round differently between branches. Everything else is exact or a single IEEE operation, so decoded weights never differ.
#pragma once

#include <cstdint>
#include <cstring>

#if !defined(LAB_PLAIN) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define LAB_AVX512 1
#endif
#if !defined(LAB_PLAIN) && !defined(LAB_AVX512) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define LAB_AVX2 1
#endif
#if defined(LAB_AVX512) || defined(LAB_AVX2)
#include <immintrin.h>
#endif

// On loops over a block's groups: shifts and scale positions become constants, which doubles the speed of some types.
#if defined(__clang__)
#define LAB_UNROLL _Pragma("clang loop unroll(full)")
#else
#define LAB_UNROLL _Pragma("GCC unroll 16")
#endif

namespace lab {

#if defined(LAB_AVX512)
constexpr int kWide = 16;
#elif defined(LAB_AVX2)
constexpr int kWide = 8;
#else
constexpr int kWide = 4;
#endif
constexpr int kLanes = 16 / kWide;

typedef float Lane __attribute__((vector_size(4 * kWide)));
typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef int8_t SignedBytes __attribute__((vector_size(16)));
typedef uint64_t Pair __attribute__((vector_size(16)));

struct Floats {
  Lane lane[kLanes];
};

template <class T>
static inline T read(const void* from) {  // from any address: fields of blocks and mapped files are not aligned
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

static inline Bytes load_bytes(const uint8_t* from) { return read<Bytes>(from); }

static inline Bytes join(uint64_t first, uint64_t second) {  // in registers: read back from memory, two stores would stall the load
  const Pair both = {first, second};
  return (Bytes)both;
}

static inline Floats load(const float* from) {
  Floats value;
  for (int i = 0; i < kLanes; ++i) value.lane[i] = read<Lane>(from + i * kWide);
  return value;
}

static inline void store(float* to, const Floats& value) { std::memcpy(to, &value, sizeof value); }

static inline Floats splat(float number) {
  Floats value;
  for (int i = 0; i < kLanes; ++i) value.lane[i] = Lane{} + number;
  return value;
}

static inline Floats operator*(Floats value, float scale) {
  for (int i = 0; i < kLanes; ++i) value.lane[i] *= scale;
  return value;
}

static inline Floats operator+(Floats value, float offset) {
  for (int i = 0; i < kLanes; ++i) value.lane[i] += offset;
  return value;
}

static inline Floats fma(const Floats& a, const Floats& b, Floats sum) {
#if defined(LAB_AVX512)
  sum.lane[0] = (Lane)_mm512_fmadd_ps((__m512)a.lane[0], (__m512)b.lane[0], (__m512)sum.lane[0]);
#elif defined(LAB_AVX2)
  for (int i = 0; i < kLanes; ++i) sum.lane[i] = (Lane)_mm256_fmadd_ps((__m256)a.lane[i], (__m256)b.lane[i], (__m256)sum.lane[i]);
#else
  for (int i = 0; i < kLanes; ++i) sum.lane[i] += a.lane[i] * b.lane[i];
#endif
  return sum;
}

// The sum of the sixteen, in every branch in the same order: eights apart, then fours, twos, ones.
static inline float total(const Floats& value) {
#if defined(LAB_AVX512) || defined(LAB_AVX2)
#if defined(LAB_AVX512)
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)value.lane[0]), _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)value.lane[0], 1)));
#else
  const __m256 eight = _mm256_add_ps((__m256)value.lane[0], (__m256)value.lane[1]);
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  float part[16];
  store(part, value);
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) part[i] += part[i + half];
  return part[0];
#endif
}

// 16 bytes as numbers 0..255.
static inline Floats from_unsigned(Bytes codes) {
  Floats value;
#if defined(LAB_AVX512)
  value.lane[0] = (Lane)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)codes));
#elif defined(LAB_AVX2)
  value.lane[0] = (Lane)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32((__m128i)codes));
  value.lane[1] = (Lane)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128((__m128i)codes, 8)));
#else
  for (int i = 0; i < 16; ++i) value.lane[i / kWide][i % kWide] = (float)codes[i];
#endif
  return value;
}

// 16 bytes as numbers -128..127.
static inline Floats from_signed(Bytes codes) {
  Floats value;
#if defined(LAB_AVX512)
  value.lane[0] = (Lane)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)codes));
#elif defined(LAB_AVX2)
  value.lane[0] = (Lane)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32((__m128i)codes));
  value.lane[1] = (Lane)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128((__m128i)codes, 8)));
#else
  for (int i = 0; i < 16; ++i) value.lane[i / kWide][i % kWide] = (float)(int8_t)codes[i];
#endif
  return value;
}

// Entry codes[i] (0..15) of a table of 16 bytes.
static inline Bytes pick(Bytes table, Bytes codes) {
#if defined(LAB_AVX512) || defined(LAB_AVX2)
  return (Bytes)_mm_shuffle_epi8((__m128i)table, (__m128i)codes);
#else
  Bytes picked = {};
  for (int i = 0; i < 16; ++i) picked[i] = table[codes[i]];
  return picked;
#endif
}

// Bit i -> byte i, 255 where set.
static inline Bytes spread(uint16_t bits) {
#if defined(LAB_AVX512)
  return (Bytes)_mm_movm_epi8(bits);
#else
  const Bytes place = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const uint64_t ones = 0x0101010101010101u;
  return (Bytes)((join((bits & 255) * ones, (bits >> 8) * ones) & place) == place);
#endif
}

static inline float from_bits(uint32_t bits) { return read<float>(&bits); }

// IEEE 754 binary16 -> binary32, exact. The plain branch moves the exponent by a multiplication, which is right for subnormals too.
static inline float half(const uint8_t* from) {
  const uint16_t bits = read<uint16_t>(from);
#if defined(LAB_AVX512) || defined(LAB_AVX2)
  return _cvtsh_ss(bits);
#else
  const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = (uint32_t)(bits & 0x7FFF) << 13;
  if ((bits & 0x7C00) == 0x7C00) return from_bits(sign | 0x7F800000u | rest);
  const float magnitude = from_bits(rest) * 0x1p112f;
  return from_bits(sign | read<uint32_t>(&magnitude));
#endif
}

static inline Floats halves(const uint8_t* from) {
  Floats value;
#if defined(LAB_AVX512)
  value.lane[0] = (Lane)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(LAB_AVX2)
  for (int i = 0; i < 2; ++i) value.lane[i] = (Lane)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + 16 * i)));
#else
  for (int i = 0; i < 16; ++i) value.lane[i / kWide][i % kWide] = half(from + 2 * i);
#endif
  return value;
}

// bfloat16 is the upper half of a binary32.
static inline float brain(const uint8_t* from) { return from_bits((uint32_t)read<uint16_t>(from) << 16); }

static inline Floats brains(const uint8_t* from) {
  Floats value;
#if defined(LAB_AVX512)
  value.lane[0] = (Lane)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#elif defined(LAB_AVX2)
  for (int i = 0; i < 2; ++i)
    value.lane[i] = (Lane)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(from + 16 * i))), 16);
#else
  for (int i = 0; i < 16; ++i) value.lane[i / kWide][i % kWide] = brain(from + 2 * i);
#endif
  return value;
}

// 16 two-bit codes, lowest bits first, as entries of `levels`, which holds its four numbers four times over.
static inline Floats pick_crumbs(uint32_t codes, const Floats& levels) {
  Floats value;
#if defined(LAB_AVX512)
  const __m512i shift = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  value.lane[0] = (Lane)_mm512_permutexvar_ps(_mm512_srlv_epi32(_mm512_set1_epi32((int)codes), shift), (__m512)levels.lane[0]);
#elif defined(LAB_AVX2)
  const __m256i shift = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
  for (int i = 0; i < 2; ++i)
    value.lane[i] = (Lane)_mm256_permutevar8x32_ps((__m256)levels.lane[0], _mm256_srlv_epi32(_mm256_set1_epi32((int)(codes >> 16 * i)), shift));
#else
  for (int i = 0; i < 16; ++i) value.lane[i / kWide][i % kWide] = levels.lane[0][codes >> 2 * i & 3];
#endif
  return value;
}

// 16 three-bit codes, lowest bits first in 48 bits, as entries of `levels`, which holds its eight numbers twice over.
static inline Floats pick_threes(uint64_t codes, const Floats& levels) {
  Floats value;
#if defined(LAB_AVX512) || defined(LAB_AVX2)
  const __m256i shift = _mm256_setr_epi32(0, 3, 6, 9, 12, 15, 18, 21);
  const __m256i first = _mm256_srlv_epi32(_mm256_set1_epi32((int)codes), shift), second = _mm256_srlv_epi32(_mm256_set1_epi32((int)(codes >> 24)), shift);
#endif
#if defined(LAB_AVX512)
  value.lane[0] = (Lane)_mm512_permutexvar_ps(_mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1), (__m512)levels.lane[0]);
#elif defined(LAB_AVX2)
  value.lane[0] = (Lane)_mm256_permutevar8x32_ps((__m256)levels.lane[0], first);
  value.lane[1] = (Lane)_mm256_permutevar8x32_ps((__m256)levels.lane[0], second);
#else
  for (int i = 0; i < 16; ++i) {
    const int code = (int)(codes >> 3 * i & 7);
    value.lane[i / kWide][i % kWide] = levels.lane[code / kWide][code % kWide];
  }
#endif
  return value;
}

}  // namespace lab
