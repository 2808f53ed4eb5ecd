// What a packed matrix is, and what a block type has to say: how to unpack one block. Everything else is made from that.
//
// A new type is a struct with `name`, `weights` per block (a multiple of 16) and `unpack(row, block, out)`, and one line in its file's table.
// For types that are one run of bytes per row, as all of GGUF's, `Blocks` turns `unpack(bytes, table, out)` into that.
#pragma once

#include "simd.h"

namespace lab {

constexpr int kParts = 3;
constexpr int kTile = 4;      // rows multiplied together: their sums do not wait for each other
constexpr int kChunk = 1024;  // weights taken at a time: a multiple of every block, and kTile rows of them fit a first-level cache

// Mirrors `Matrix` in calls.py. Strides are in bytes; a stack holds `count` matrices of `rows` x `cols`.
struct Matrix {
  const uint8_t* part[kParts];
  int64_t row_stride[kParts], matrix_stride[kParts];
  const uint8_t* table;  // codebook or levels, or null
  int64_t count, rows, cols;
  int32_t kind;
};

struct Row {
  const uint8_t* part[kParts];
  const uint8_t* table;
};

static inline Row row_of(const Matrix& m, int64_t matrix, int64_t row) {
  Row found;
  for (int p = 0; p < kParts; ++p) found.part[p] = m.part[p] + matrix * m.matrix_stride[p] + row * m.row_stride[p];
  found.table = m.table;
  return found;
}

struct Kind {
  const char* name;
  int weights, bytes;  // per block; bytes of part 0
  int multiple;        // columns must be a multiple of this
  // Weights [first, first + count) of a row; `first` and, except at the row's end, `count` are multiples of `weights`. Writes up to 15 more zeros.
  void (*decode)(const Row& row, int64_t first, int64_t count, float* out);
  // sum[r] += weights [first, first + count) of each of kTile rows times x[0 .. count); both are multiples of `weights`.
  void (*dot)(const Row* rows, int64_t first, int64_t count, const float* x, float* sum);
};

// Asks for the bytes that come kAhead later, which for rows side by side are rows further on: several short runs at a time are more than hardware
// prefetchers follow. Without it packed weights arrived from memory 2 to 8 times slower than from a cache; from 8 KiB on the difference was gone.
constexpr int kAhead = 8192;

template <class Type>
static inline void fetch_ahead(const Row& row, int64_t block) {
  const uintptr_t address = (uintptr_t)row.part[0] + block * Type::bytes + kAhead;  // a number: it may lie beyond the tensor, and is not read
  for (int b = 0; b < Type::bytes; b += 64) __builtin_prefetch((const void*)(address + b));
}

template <class Type, bool ragged>
void decode_span(const Row& row, int64_t first, int64_t count, float* out) {
  constexpr int vectors = Type::weights / 16;
  Floats block[vectors];
  const int64_t begin = first / Type::weights, whole = count / Type::weights;
  for (int64_t i = 0; i < whole; ++i) {
    fetch_ahead<Type>(row, begin + i);
    Type::unpack(row, begin + i, block);
    for (int v = 0; v < vectors; ++v) store(out + i * Type::weights + 16 * v, block[v]);
  }
  if constexpr (ragged) {  // nothing is read beyond the row's end
    const int64_t rest = count % Type::weights;
    if (rest) {
      uint8_t padded[Type::bytes] = {};
      std::memcpy(padded, row.part[0] + (begin + whole) * Type::bytes, rest * (Type::bytes / Type::weights));
      Row end = row;
      end.part[0] = padded;
      Type::unpack(end, 0, block);
      store(out + whole * Type::weights, block[0]);
    }
  }
}

// For a single vector: blocks stay in registers. Sums are made in the order of native.cpp's `tile`.
template <class Type>
void dot_span(const Row* rows, int64_t first, int64_t count, const float* x, float* sum) {
  constexpr int vectors = Type::weights / 16;
  Floats part[kTile];
  for (int r = 0; r < kTile; ++r) part[r] = splat(0.0f);
  const int64_t begin = first / Type::weights, whole = count / Type::weights;
  for (int64_t i = 0; i < whole; ++i)
    for (int r = 0; r < kTile; ++r) {
      Floats block[vectors];
      fetch_ahead<Type>(rows[r], begin + i);
      Type::unpack(rows[r], begin + i, block);
      for (int v = 0; v < vectors; ++v) part[r] = fma(block[v], load(x + i * Type::weights + 16 * v), part[r]);
    }
  for (int r = 0; r < kTile; ++r) sum[r] += total(part[r]);
}

// `ragged`: one weight is whole bytes of part 0 alone, so that a row may end inside a block.
template <class Type, bool ragged = false>
constexpr Kind kind() {
  return {Type::name, Type::weights, Type::bytes, ragged ? 1 : Type::weights, decode_span<Type, ragged>, dot_span<Type>};
}

template <class Type>
struct Blocks : Type {
  static void unpack(const Row& row, int64_t block, Floats* out) { Type::unpack(row.part[0] + block * Type::bytes, row.table, out); }
};

struct Kinds {
  const Kind* first;
  int count;
};

Kinds simple_kinds();
Kinds k_kinds();
Kinds grid_kinds();
Kinds lab_kinds();

}  // namespace lab
