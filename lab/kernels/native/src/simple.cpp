// GGUF types with one scale, or one per small group, and no codebook. Layouts: ggml-common.h and dequantize_row_* of ggml-quants.c, as told in
// lab/codecs/gguf_simple.py. Products are made in ggml's order, so that weights are bit-equal to the codecs'.
#include "kind.h"

namespace lab {
namespace {

const Bytes kLow = {15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15};
const Bytes kFifth = Bytes{} + 16;
const Bytes kIq4Levels = (Bytes)SignedBytes{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};  // kvalues_iq4nl
const Bytes kE2m1Doubled = (Bytes)SignedBytes{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // OCP Microscaling v1.0, twice E2M1

struct F32 {
  static constexpr const char* name = "F32";
  static constexpr int weights = 16, bytes = 64;
  static void unpack(const uint8_t* b, const uint8_t*, Floats* w) { w[0] = read<Floats>(b); }
};

struct F16 {
  static constexpr const char* name = "F16";
  static constexpr int weights = 16, bytes = 32;
  static void unpack(const uint8_t* b, const uint8_t*, Floats* w) { w[0] = halves(b); }
};

struct BF16 {
  static constexpr const char* name = "BF16";
  static constexpr int weights = 16, bytes = 32;
  static void unpack(const uint8_t* b, const uint8_t*, Floats* w) { w[0] = brains(b); }
};

struct Q8_0 {
  static constexpr const char* name = "Q8_0";
  static constexpr int weights = 32, bytes = 34;
  static void unpack(const uint8_t* b, const uint8_t*, Floats* w) {
    const float d = half(b);
    w[0] = from_signed(load_bytes(b + 2)) * d;
    w[1] = from_signed(load_bytes(b + 18)) * d;
  }
};

struct Q4_0 {
  static constexpr const char* name = "Q4_0";
  static constexpr int weights = 32, bytes = 18;
  static void unpack(const uint8_t* b, const uint8_t*, Floats* w) {
    const float d = half(b);
    const Bytes q = load_bytes(b + 2);
    w[0] = from_signed((q & kLow) - 8) * d;
    w[1] = from_signed((q >> 4) - 8) * d;
  }
};

struct Q4_1 {
  static constexpr const char* name = "Q4_1";
  static constexpr int weights = 32, bytes = 20;
  static void unpack(const uint8_t* b, const uint8_t*, Floats* w) {
    const float d = half(b), m = half(b + 2);
    const Bytes q = load_bytes(b + 4);
    w[0] = from_unsigned(q & kLow) * d + m;
    w[1] = from_unsigned(q >> 4) * d + m;
  }
};

struct Q5_0 {
  static constexpr const char* name = "Q5_0";
  static constexpr int weights = 32, bytes = 22;
  static void unpack(const uint8_t* b, const uint8_t*, Floats* w) {
    const float d = half(b);
    const Bytes q = load_bytes(b + 6);
    w[0] = from_signed(((q & kLow) | (spread(read<uint16_t>(b + 2)) & kFifth)) - 16) * d;
    w[1] = from_signed(((q >> 4) | (spread(read<uint16_t>(b + 4)) & kFifth)) - 16) * d;
  }
};

struct Q5_1 {
  static constexpr const char* name = "Q5_1";
  static constexpr int weights = 32, bytes = 24;
  static void unpack(const uint8_t* b, const uint8_t*, Floats* w) {
    const float d = half(b), m = half(b + 2);
    const Bytes q = load_bytes(b + 8);
    w[0] = from_unsigned((q & kLow) | (spread(read<uint16_t>(b + 4)) & kFifth)) * d + m;
    w[1] = from_unsigned((q >> 4) | (spread(read<uint16_t>(b + 6)) & kFifth)) * d + m;
  }
};

struct IQ4_NL {
  static constexpr const char* name = "IQ4_NL";
  static constexpr int weights = 32, bytes = 18;
  static void unpack(const uint8_t* b, const uint8_t*, Floats* w) {
    const float d = half(b);
    const Bytes q = load_bytes(b + 2);
    w[0] = from_signed(pick(kIq4Levels, q & kLow)) * d;
    w[1] = from_signed(pick(kIq4Levels, q >> 4)) * d;
  }
};

struct IQ4_XS {
  static constexpr const char* name = "IQ4_XS";
  static constexpr int weights = 256, bytes = 136;
  static void unpack(const uint8_t* b, const uint8_t*, Floats* w) {
    const float d = half(b);
    const int high = read<uint16_t>(b + 2);
    for (int g = 0; g < 8; ++g) {
      const int scale = ((b[4 + g / 2] >> 4 * (g % 2)) & 15) | (((high >> 2 * g) & 3) << 4);
      const float ds = d * (float)(scale - 32);
      const Bytes q = load_bytes(b + 8 + 16 * g);
      w[2 * g] = from_signed(pick(kIq4Levels, q & kLow)) * ds;
      w[2 * g + 1] = from_signed(pick(kIq4Levels, q >> 4)) * ds;
    }
  }
};

struct MXFP4 {
  static constexpr const char* name = "MXFP4";
  static constexpr int weights = 32, bytes = 17;
  static void unpack(const uint8_t* b, const uint8_t*, Floats* w) {
    const float d = from_bits(b[0] < 2 ? 0x00200000u << b[0] : (uint32_t)(b[0] - 1) << 23);  // 2^(e - 128), half of E8M0; 255 is no NaN in ggml
    const Bytes q = load_bytes(b + 1);
    w[0] = from_signed(pick(kE2m1Doubled, q & kLow)) * d;
    w[1] = from_signed(pick(kE2m1Doubled, q >> 4)) * d;
  }
};

struct NVFP4 {
  static constexpr const char* name = "NVFP4";
  static constexpr int weights = 64, bytes = 36;
  static float scale(int byte) {  // half of the unsigned E4M3 value; 0x7F is 0 in ggml
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    if (byte == 0x7F) return 0.0f;
    return exponent ? from_bits((uint32_t)(exponent + 119) << 23 | (uint32_t)mantissa << 20) : (float)mantissa * 0x1p-10f;
  }
  static void unpack(const uint8_t* b, const uint8_t*, Floats* w) {
    const uint64_t low = 0x0F0F0F0F0F0F0F0Fu;
    for (int g = 0; g < 4; ++g) {
      const uint64_t q = read<uint64_t>(b + 4 + 8 * g);
      w[g] = from_signed(pick(kE2m1Doubled, join(q & low, q >> 4 & low))) * scale(b[g]);
    }
  }
};

struct Q1_0 {
  static constexpr const char* name = "Q1_0";
  static constexpr int weights = 128, bytes = 18;
  static void unpack(const uint8_t* b, const uint8_t*, Floats* w) {
    const float d = half(b);
    for (int g = 0; g < 8; ++g) w[g] = from_signed((spread(read<uint16_t>(b + 2 + 2 * g)) & 2) - 1) * d;
  }
};

template <int groups>
struct Crumbs {
  static constexpr int weights = 16 * groups, bytes = 2 + 4 * groups;
  static void unpack(const uint8_t* b, const uint8_t*, Floats* w) {
    const float once[16] = {-1, 0, 1, 2, -1, 0, 1, 2, -1, 0, 1, 2, -1, 0, 1, 2};
    const Floats levels = load(once);
    const float d = half(b);
    for (int g = 0; g < groups; ++g) w[g] = pick_crumbs(read<uint32_t>(b + 2 + 4 * g), levels) * d;
  }
};

struct Q2_0 : Crumbs<4> {
  static constexpr const char* name = "Q2_0";
};

struct Q2_0_G128 : Crumbs<8> {
  static constexpr const char* name = "Q2_0_G128";
};

constexpr Kind kKinds[] = {
    kind<Blocks<F32>, true>(),    kind<Blocks<F16>, true>(),    kind<Blocks<BF16>, true>(),   kind<Blocks<Q8_0>>(),  kind<Blocks<Q4_0>>(),
    kind<Blocks<Q4_1>>(),   kind<Blocks<Q5_0>>(),   kind<Blocks<Q5_1>>(),   kind<Blocks<IQ4_NL>>(), kind<Blocks<IQ4_XS>>(),
    kind<Blocks<MXFP4>>(),  kind<Blocks<NVFP4>>(),  kind<Blocks<Q1_0>>(),   kind<Blocks<Q2_0>>(),  kind<Blocks<Q2_0_G128>>(),
};

}  // namespace

Kinds simple_kinds() { return {kKinds, sizeof kKinds / sizeof kKinds[0]}; }

}  // namespace lab
