// What writing a VQF file costs most: its blocks from float32 weights, and its checksum. The rules are those of lab/codecs/vqf_encode.py, bit for bit; every
// float operation is written out in the same order. Rows are shared out over OpenMP threads; the checksum hangs together byte by byte and is one thread's.
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kBlock = 32, kGroup = 256;
enum Kind { kQ8 = 0, kG256 = 1, kQ4 = 2, kQ4i = 3, kF16 = 4 };

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

uint16_t to_half(float value) {  // to nearest, ties to even, with subnormals
  const uint32_t bits = bits_of(value), size = bits & 0x7FFFFFFF;
  const uint16_t sign = bits >> 16 & 0x8000;
  if (size > 0x7F800000) return sign | 0x7E00;
  if (size >= 0x477FF000) return sign | 0x7C00;
  if (size < 0x38800000) return sign | (uint16_t)(bits_of(float_of(size) + 0.5f) - 0x3F000000);  // a step of 0.5's float is half's smallest
  return sign | (uint16_t)((size + 0x0FFF + (size >> 13 & 1) - 0x38000000) >> 13);
}

uint16_t cut_to_half(float value) {  // the mantissa cut off, subnormals to signed zeros, from 65536 on infinite
  const uint32_t bits = bits_of(value), size = bits & 0x7FFFFFFF;
  const uint16_t sign = bits >> 16 & 0x8000;
  if (size < 0x38800000) return sign;
  if (size >= 0x47800000) return sign | 0x7C00;
  return sign | (uint16_t)((size - 0x38000000) >> 13);
}

float largest(const float* from, int count) {  // magnitudes are ordered like their bits, and a maximum of integers is one that compilers vectorise
  uint32_t found = 0;
  for (int i = 0; i < count; ++i) {
    const uint32_t size = bits_of(from[i]) & 0x7FFFFFFF;
    found = size > found ? size : found;
  }
  return float_of(found);
}

void eight_bit(const float* from, float inverse, int8_t* to) {  // nearest, halves away from zero, exactly
  for (int i = 0; i < kBlock; ++i) {
    const float value = from[i] * inverse, whole = std::trunc(value), rest = value - whole;
    float code = whole + (rest >= 0.5f ? 1.0f : rest <= -0.5f ? -1.0f : 0.0f);
    code = code > 127.0f ? 127.0f : code < -127.0f ? -127.0f : code;
    to[i] = (int8_t)code;
  }
}

float four_bit(const float* from, uint8_t* to) {  // returns the scale; the first weight of largest magnitude becomes code 0
  const float size = largest(from, kBlock);
  int first = 0;
  while (first < kBlock - 1 && std::fabs(from[first]) != size) ++first;
  float scale = from[first] / -8.0f;
  if (scale == 0.0f) scale = 1.0f;
  const float inverse = 1.0f / scale;
  for (int i = 0; i < kBlock; ++i) {
    float value = from[i] * inverse;
    value = (value != value ? 0.0f : value) + 8.5f;
    value = value < 0.0f ? 0.0f : value > 15.0f ? 15.0f : value;
    to[i] = (uint8_t)value;
  }
  return scale;
}

void put_half(float scale, uint8_t* to) {
  const uint16_t half = to_half(scale);
  std::memcpy(to, &half, 2);
}

void encode_row(int kind, const float* from, int64_t cols, uint8_t* to) {
  if (kind == kF16) {
    for (int64_t i = 0; i < cols; ++i) {
      const uint16_t half = cut_to_half(from[i]);
      std::memcpy(to + 2 * i, &half, 2);
    }
    return;
  }
  float scale = 0.0f, inverse = 0.0f;
  for (int64_t i = 0; i < cols; i += kBlock) {
    if (kind == kQ4) {
      uint8_t codes[kBlock];
      put_half(four_bit(from + i, codes), to);
      for (int j = 0; j < kBlock / 2; ++j) to[2 + j] = codes[j] | codes[kBlock / 2 + j] << 4;
      to += 2 + kBlock / 2;
      continue;
    }
    if (kind == kQ4i) {
      uint8_t codes[kBlock];
      put_half(four_bit(from + i, codes), to);
      for (int j = 0; j < kBlock; ++j) to[2 + j] = (uint8_t)(codes[j] - 8);
    } else {
      if (kind == kQ8 || i % kGroup == 0) {
        const float size = largest(from + i, kind == kQ8 ? kBlock : kGroup);
        scale = (size < 1e-10f ? 1e-10f : size) / 127.0f;
        inverse = 1.0f / scale;
      }
      put_half(scale, to);
      eight_bit(from + i, inverse, (int8_t*)to + 2);
    }
    to += 2 + kBlock;
  }
}

}  // namespace

extern "C" {

// `from` float32 [rows, cols], finite; cols a multiple of the kind's block; `to` the rows' bytes side by side.
void lab_vqf_encode(int kind, const float* from, int64_t rows, int64_t cols, int64_t row_bytes, uint8_t* to, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * cols > (1 << 16))
  for (int64_t row = 0; row < rows; ++row) encode_row(kind, from + row * cols, cols, to + row * row_bytes);
}

// FNV-1a, 64 bits, going on from `state` (draft-eastlake-fnv).
uint64_t lab_fnv1a(const uint8_t* data, int64_t count, uint64_t state) {
  for (int64_t i = 0; i < count; ++i) state = (state ^ data[i]) * 0x100000001B3ull;
  return state;
}
}
