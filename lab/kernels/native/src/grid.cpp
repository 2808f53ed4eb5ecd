// GGUF types that index a codebook of 4 or 8 weights. Layouts: ggml-common.h and dequantize_row_iq* of ggml-quants.c, as told in
// lab/codecs/gguf_grid.py. `table` is the codebook as int8 entries side by side; it comes from the caller and is not part of this file.
#include "kind.h"

namespace lab {
namespace {

static inline uint64_t entry8(const uint8_t* table, int number) { return read<uint64_t>(table + 8 * number); }
static inline uint64_t entry4(const uint8_t* table, int number) { return read<uint32_t>(table + 4 * number); }

static inline Bytes negated(Bytes codes, int signs) {  // bit i set: byte i times -1
  const Bytes mask = spread((uint16_t)signs);
  return (codes ^ mask) - mask;
}

// Bits 0-6 of the number, and an eighth that makes the count of minus signs even (ksigns_iq2xs).
static inline int signs_of(int number) { return number | __builtin_parity(number) << 7; }

struct IQ2_XXS {
  static constexpr const char* name = "IQ2_XXS";
  static constexpr int weights = 256, bytes = 66;
  static void unpack(const uint8_t* b, const uint8_t* table, Floats* w) {
    const float d = half(b);
    LAB_UNROLL for (int g = 0; g < 8; ++g) {
      const uint8_t* entry = b + 2 + 8 * g;
      const uint32_t word = read<uint32_t>(entry + 4);
      const float scale = d * (0.5f + (float)(word >> 28)) * 0.25f;
      LAB_UNROLL for (int i = 0; i < 2; ++i) {
        const int signs = signs_of(word >> 14 * i & 127) | signs_of(word >> (14 * i + 7) & 127) << 8;
        w[2 * g + i] = from_signed(negated(join(entry8(table, entry[2 * i]), entry8(table, entry[2 * i + 1])), signs)) * scale;
      }
    }
  }
};

struct IQ2_XS {
  static constexpr const char* name = "IQ2_XS";
  static constexpr int weights = 256, bytes = 74;
  static void unpack(const uint8_t* b, const uint8_t* table, Floats* w) {
    const float d = half(b);
    LAB_UNROLL for (int g = 0; g < 16; ++g) {
      const int first = read<uint16_t>(b + 2 + 4 * g), second = read<uint16_t>(b + 4 + 4 * g);
      const float scale = d * (0.5f + (float)(b[66 + g / 2] >> 4 * (g % 2) & 15)) * 0.25f;
      const int signs = signs_of(first >> 9) | signs_of(second >> 9) << 8;
      w[g] = from_signed(negated(join(entry8(table, first & 511), entry8(table, second & 511)), signs)) * scale;
    }
  }
};

struct IQ2_S {
  static constexpr const char* name = "IQ2_S";
  static constexpr int weights = 256, bytes = 82;
  static void unpack(const uint8_t* b, const uint8_t* table, Floats* w) {
    const float d = half(b);
    LAB_UNROLL for (int g = 0; g < 16; ++g) {
      const int high = b[66 + g / 2] >> 4 * (g % 2);
      const int first = b[2 + 2 * g] | (high & 3) << 8, second = b[3 + 2 * g] | (high & 12) << 6;
      const float scale = d * (0.5f + (float)(b[74 + g / 2] >> 4 * (g % 2) & 15)) * 0.25f;
      w[g] = from_signed(negated(join(entry8(table, first), entry8(table, second)), read<uint16_t>(b + 34 + 2 * g))) * scale;
    }
  }
};

struct IQ3_XXS {
  static constexpr const char* name = "IQ3_XXS";
  static constexpr int weights = 256, bytes = 98;
  static void unpack(const uint8_t* b, const uint8_t* table, Floats* w) {
    const float d = half(b);
    LAB_UNROLL for (int g = 0; g < 8; ++g) {
      const uint32_t word = read<uint32_t>(b + 66 + 4 * g);
      const float scale = d * (0.5f + (float)(word >> 28)) * 0.5f;
      LAB_UNROLL for (int i = 0; i < 2; ++i) {
        const uint8_t* entry = b + 2 + 8 * g + 4 * i;
        const int signs = signs_of(word >> 14 * i & 127) | signs_of(word >> (14 * i + 7) & 127) << 8;
        const uint64_t first = entry4(table, entry[0]) | entry4(table, entry[1]) << 32, second = entry4(table, entry[2]) | entry4(table, entry[3]) << 32;
        w[2 * g + i] = from_signed(negated(join(first, second), signs)) * scale;
      }
    }
  }
};

struct IQ3_S {
  static constexpr const char* name = "IQ3_S";
  static constexpr int weights = 256, bytes = 110;
  static void unpack(const uint8_t* b, const uint8_t* table, Floats* w) {
    const float d = half(b);
    LAB_UNROLL for (int g = 0; g < 16; ++g) {
      const uint8_t* entry = b + 2 + 4 * g;
      const int ninth = b[66 + g / 2] >> 4 * (g % 2);
      uint64_t found[4];
      LAB_UNROLL for (int i = 0; i < 4; ++i) found[i] = entry4(table, entry[i] | (ninth >> i & 1) << 8);
      const float scale = d * (float)(1 + 2 * (b[106 + g / 4] >> 4 * (g / 2 % 2) & 15));
      w[g] = from_signed(negated(join(found[0] | found[1] << 32, found[2] | found[3] << 32), read<uint16_t>(b + 74 + 2 * g))) * scale;
    }
  }
};

// Two entries of the codebook that IQ1_S and IQ1_M share, in eighths: 8 entry - 1 where lowered, 8 entry + 1 where not.
static inline Floats eighths(const uint8_t* table, int first, int second, bool first_lowered, bool second_lowered) {
  const uint64_t up = 0x0101010101010101u, down = ~(uint64_t)0;
  const Bytes entries = join(entry8(table, first), entry8(table, second));
  return from_signed((entries << 3) + join(first_lowered ? down : up, second_lowered ? down : up));
}

struct IQ1_S {
  static constexpr const char* name = "IQ1_S";
  static constexpr int weights = 256, bytes = 50;
  static void unpack(const uint8_t* b, const uint8_t* table, Floats* w) {
    const float d = half(b);
    LAB_UNROLL for (int g = 0; g < 8; ++g) {
      const uint8_t* low = b + 2 + 4 * g;
      const int word = read<uint16_t>(b + 34 + 2 * g);
      const bool lowered = word >> 15;
      const float scale = d * (float)(2 * (word >> 12 & 7) + 1) * 0.125f;
      LAB_UNROLL for (int i = 0; i < 2; ++i)
        w[2 * g + i] = eighths(table, low[2 * i] | (word >> 6 * i & 7) << 8, low[2 * i + 1] | (word >> (6 * i + 3) & 7) << 8, lowered, lowered) * scale;
    }
  }
};

struct IQ1_M {
  static constexpr const char* name = "IQ1_M";
  static constexpr int weights = 256, bytes = 56;
  static void unpack(const uint8_t* b, const uint8_t* table, Floats* w) {
    uint16_t bits = 0;
    LAB_UNROLL for (int i = 0; i < 4; ++i) bits |= (read<uint16_t>(b + 48 + 2 * i) >> 12) << 4 * i;
    const float d = half((const uint8_t*)&bits);
    LAB_UNROLL for (int g = 0; g < 16; ++g) {
      const int high = b[32 + g], word = read<uint16_t>(b + 48 + 2 * (g / 4));
      const float scale = d * (float)(2 * (word >> 3 * (g % 4) & 7) + 1) * 0.125f;
      w[g] = eighths(table, b[2 * g] | (high & 7) << 8, b[2 * g + 1] | (high >> 4 & 7) << 8, high & 8, high & 128) * scale;
    }
  }
};

constexpr Kind kKinds[] = {
    kind<Blocks<IQ2_XXS>>(), kind<Blocks<IQ2_XS>>(), kind<Blocks<IQ2_S>>(), kind<Blocks<IQ3_XXS>>(),
    kind<Blocks<IQ3_S>>(),   kind<Blocks<IQ1_S>>(),  kind<Blocks<IQ1_M>>(),
};

}  // namespace

Kinds grid_kinds() { return {kKinds, sizeof kKinds / sizeof kKinds[0]}; }

}  // namespace lab
