// The lab's own codecs: int8_g128, the 2-bit family and w3_levels (lab/codecs/plain.py, q2.py, w3.py; bf16 is GGUF's BF16). Part 0 holds codes, part 1
// scales, part 2 a float32 factor per matrix; `table` holds the float32 levels, repeated to 16.
#include "kind.h"

namespace lab {
namespace {

struct F32Scale {
  static constexpr int bytes = 4;
  static float at(const Row& row, int64_t i) { return read<float>(row.part[1] + 4 * i); }
};

struct F16Scale {
  static constexpr int bytes = 2;
  static float at(const Row& row, int64_t i) { return half(row.part[1] + 2 * i); }
};

struct BF16Scale {
  static constexpr int bytes = 2;
  static float at(const Row& row, int64_t i) { return brain(row.part[1] + 2 * i); }
};

struct E4M3Scale {  // e4m3fn: exponent bias 7, 0x7F is NaN; times the matrix's factor
  static constexpr int bytes = 1;
  static float at(const Row& row, int64_t i) {
    const uint32_t bits = row.part[1][i], rest = bits & 127;
    const float magnitude = rest == 127 ? from_bits(0x7FC00000u) : from_bits(rest << 20) * 0x1p120f;
    return from_bits(read<uint32_t>(&magnitude) | (bits & 128) << 24) * read<float>(row.part[2]);
  }
};

struct Int8G128 {
  static constexpr const char* name = "int8_g128";
  static constexpr int weights = 16, bytes = 16;
  static void unpack(const Row& row, int64_t block, Floats* w) {
    w[0] = from_signed(load_bytes(row.part[0] + 16 * block)) * BF16Scale::at(row, block / 8);
  }
};

template <class Scale>
struct Q2Row {  // one scale for the row
  static constexpr int weights = 16, bytes = 4;
  static void unpack(const Row& row, int64_t block, Floats* w) {
    w[0] = pick_crumbs(read<uint32_t>(row.part[0] + 4 * block), read<Floats>(row.table)) * Scale::at(row, 0);
  }
};

struct Q2RowF32 : Q2Row<F32Scale> {
  static constexpr const char* name = "q2_row:float32";
};
struct Q2RowF16 : Q2Row<F16Scale> {
  static constexpr const char* name = "q2_row:float16";
};
struct Q2RowBF16 : Q2Row<BF16Scale> {
  static constexpr const char* name = "q2_row:bfloat16";
};

template <class Scale>
struct Q2G32 {
  static constexpr int weights = 32, bytes = 8;
  static void unpack(const Row& row, int64_t block, Floats* w) {
    const uint8_t* codes = row.part[0] + 8 * block;
    const float scale = Scale::at(row, block);
    for (int i = 0; i < 2; ++i) w[i] = pick_crumbs(read<uint32_t>(codes + 4 * i), read<Floats>(row.table)) * scale;
  }
};

struct Q2G32F16 : Q2G32<F16Scale> {
  static constexpr const char* name = "q2_g32:float16";
};
struct Q2G32BF16 : Q2G32<BF16Scale> {
  static constexpr const char* name = "q2_g32:bfloat16";
};
struct Q2G32E4M3 : Q2G32<E4M3Scale> {
  static constexpr const char* name = "q2_g32:e4m3";
};

// 32 codes in three words -> two runs of 16 codes in 48 bits.
struct Straight {
  static void runs(const uint8_t* b, uint64_t* run) {
    run[0] = read<uint32_t>(b) | (uint64_t)read<uint16_t>(b + 4) << 32;
    run[1] = read<uint16_t>(b + 6) | (uint64_t)read<uint32_t>(b + 8) << 16;
  }
};

struct TenTenTen {  // ten codes per word; bits 30-31 of the three words are codes 30 and 31
  static void runs(const uint8_t* b, uint64_t* run) {
    const uint64_t first = read<uint32_t>(b), second = read<uint32_t>(b + 4), third = read<uint32_t>(b + 8), ten = 0x3FFFFFFFu;
    run[0] = (first & ten) | (second & 0x3FFFFu) << 30;
    run[1] = (second & ten) >> 18 | (third & ten) << 12 | ((first >> 30) | (second >> 30) << 2 | (third >> 30) << 4) << 42;
  }
};

template <class Order>
struct W3 {
  static constexpr int weights = 64, bytes = 24;
  static void unpack(const Row& row, int64_t block, Floats* w) {
    const float scale = E4M3Scale::at(row, block);
    for (int i = 0; i < 2; ++i) {
      uint64_t run[2];
      Order::runs(row.part[0] + 24 * block + 12 * i, run);
      for (int j = 0; j < 2; ++j) w[2 * i + j] = pick_threes(run[j], read<Floats>(row.table)) * scale;
    }
  }
};

struct W3Straight : W3<Straight> {
  static constexpr const char* name = "w3_levels:straight";
};
struct W3TenTenTen : W3<TenTenTen> {
  static constexpr const char* name = "w3_levels:10_10_10_2";
};

constexpr Kind kKinds[] = {
    kind<Int8G128>(),  kind<Q2RowF32>(),  kind<Q2RowF16>(),   kind<Q2RowBF16>(),   kind<Q2G32F16>(),
    kind<Q2G32BF16>(), kind<Q2G32E4M3>(), kind<W3Straight>(), kind<W3TenTenTen>(),
};

}  // namespace

Kinds lab_kinds() { return {kKinds, sizeof kKinds / sizeof kKinds[0]}; }

}  // namespace lab
