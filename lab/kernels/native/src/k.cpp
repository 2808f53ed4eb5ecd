// GGUF K blocks: 256 weights in groups of 16 or 32 whose scales are small integers times one or two float16. Layouts: ggml-common.h and
// dequantize_row_q*_K of ggml-quants.c, as told in lab/codecs/gguf_k.py.
#include "kind.h"

namespace lab {
namespace {

struct Q2_K {
  static constexpr const char* name = "Q2_K";
  static constexpr int weights = 256, bytes = 84;
  static void unpack(const uint8_t* b, const uint8_t*, Floats* w) {
    const float d = half(b + 80), dmin = half(b + 82);
    LAB_UNROLL for (int h = 0; h < 2; ++h)
      LAB_UNROLL for (int i = 0; i < 2; ++i) {
        const Bytes q = load_bytes(b + 16 + 32 * h + 16 * i);
        LAB_UNROLL for (int j = 0; j < 4; ++j) {
          const int g = 8 * h + 2 * j + i;
          w[g] = from_unsigned((q >> 2 * j) & 3) * (d * (float)(b[g] & 15)) + -(dmin * (float)(b[g] >> 4));
        }
      }
  }
};

struct Q3_K {
  static constexpr const char* name = "Q3_K";
  static constexpr int weights = 256, bytes = 110;
  static void unpack(const uint8_t* b, const uint8_t*, Floats* w) {
    const float d = half(b + 108);
    LAB_UNROLL for (int h = 0; h < 2; ++h)
      LAB_UNROLL for (int i = 0; i < 2; ++i) {
        const Bytes low = load_bytes(b + 32 + 32 * h + 16 * i), high = load_bytes(b + 16 * i) >> 4 * h;
        LAB_UNROLL for (int j = 0; j < 4; ++j) {
          const int g = 8 * h + 2 * j + i;
          const int scale = ((b[96 + g % 8] >> 4 * (g / 8)) & 15) | (((b[104 + g % 4] >> 2 * (g / 4)) & 3) << 4);
          w[g] = from_signed((((low >> 2 * j) & 3) | (((high >> j) & 1) << 2)) - 4) * (d * (float)(scale - 32));
        }
      }
  }
};

// The 12 bytes at `b` that Q4_K and Q5_K share: eight 6-bit scales and minima.
static inline int scale_of(const uint8_t* b, int g) { return g < 4 ? b[g] & 63 : (b[g + 4] & 15) | ((b[g - 4] >> 2) & 48); }
static inline int minimum_of(const uint8_t* b, int g) { return g < 4 ? b[g + 4] & 63 : (b[g + 4] >> 4) | ((b[g] >> 2) & 48); }

struct Q4_K {
  static constexpr const char* name = "Q4_K";
  static constexpr int weights = 256, bytes = 144;
  static void unpack(const uint8_t* b, const uint8_t*, Floats* w) {
    const float d = half(b), dmin = half(b + 2);
    LAB_UNROLL for (int g = 0; g < 8; ++g) {
      const float scale = d * (float)scale_of(b + 4, g), offset = -(dmin * (float)minimum_of(b + 4, g));
      LAB_UNROLL for (int i = 0; i < 2; ++i) w[2 * g + i] = from_unsigned((load_bytes(b + 16 + 32 * (g / 2) + 16 * i) >> 4 * (g % 2)) & 15) * scale + offset;
    }
  }
};

struct Q5_K {
  static constexpr const char* name = "Q5_K";
  static constexpr int weights = 256, bytes = 176;
  static void unpack(const uint8_t* b, const uint8_t*, Floats* w) {
    const float d = half(b), dmin = half(b + 2);
    LAB_UNROLL for (int g = 0; g < 8; ++g) {
      const float scale = d * (float)scale_of(b + 4, g), offset = -(dmin * (float)minimum_of(b + 4, g));
      LAB_UNROLL for (int i = 0; i < 2; ++i) {
        const Bytes low = (load_bytes(b + 48 + 32 * (g / 2) + 16 * i) >> 4 * (g % 2)) & 15, fifth = (load_bytes(b + 16 + 16 * i) >> g) & 1;
        w[2 * g + i] = from_unsigned(low | (fifth << 4)) * scale + offset;
      }
    }
  }
};

struct Q6_K {
  static constexpr const char* name = "Q6_K";
  static constexpr int weights = 256, bytes = 210;
  static void unpack(const uint8_t* b, const uint8_t*, Floats* w) {
    const float d = half(b + 208);
    LAB_UNROLL for (int g = 0; g < 16; ++g) {
      const int h = g / 8, j = g % 8;
      const Bytes low = (load_bytes(b + 64 * h + 16 * (j % 4)) >> 4 * (j / 4)) & 15, high = (load_bytes(b + 128 + 32 * h + 16 * (j % 2)) >> 2 * (j / 2)) & 3;
      w[g] = from_signed((low | (high << 4)) - 32) * (d * (float)(int8_t)b[192 + g]);
    }
  }
};

constexpr Kind kKinds[] = {kind<Blocks<Q2_K>>(), kind<Blocks<Q3_K>>(), kind<Blocks<Q4_K>>(), kind<Blocks<Q5_K>>(), kind<Blocks<Q6_K>>()};

}  // namespace

Kinds k_kinds() { return {kKinds, sizeof kKinds / sizeof kKinds[0]}; }

}  // namespace lab
