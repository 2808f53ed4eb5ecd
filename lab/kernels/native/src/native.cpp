// The functions that Python calls: decode rows, and multiply packed rows by vectors. Rows are shared out over OpenMP threads.
//
// A product with one vector decodes blocks in registers. With several it decodes a piece of four rows into the first-level cache and multiplies it by
// up to four vectors at a time, so that decoding is paid once for all of them. Each (row, vector) pair is summed in one fixed order, whatever the
// thread, the tile or the number of vectors: a token's result does not depend on what else is in the batch. Nothing is checked here; calls.py has
// checked shapes and bounds.
#include <algorithm>

#include "kind.h"

namespace lab {
namespace {

constexpr int kVectors = kWide == 16 ? 4 : 1;  // multiplied together, as far as the sums of kTile rows fit the registers
constexpr int kPiece = kChunk + 16;            // floats from one decoded row to the next: not a power of two, which would fall on the same cache sets
constexpr int64_t kBatch = 64;                 // vectors per pass over the rows: their activations stay in a second-level cache, decoding is a 64th per vector
constexpr int64_t kWorthAThread = 1 << 16;    // weights: some microseconds, as is waking a thread

const Kind* find_kind(int number) {
  for (const Kinds& kinds : {simple_kinds(), k_kinds(), grid_kinds(), lab_kinds()}) {
    if (number < kinds.count) return kinds.first + number;
    number -= kinds.count;
  }
  return nullptr;
}

void round_to_brains(const float* from, int64_t count, uint16_t* to) {  // to nearest, ties to even; NaN becomes 0x7FC0, as in torch
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = read<uint32_t>(from + i);
    const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    to[i] = (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
  }
}

void decode_row(const Kind& kind, const Row& row, int64_t cols, void* out, int64_t at, bool brain) {
  alignas(64) float piece[kChunk];
  for (int64_t first = 0; first < cols; first += kChunk) {
    const int64_t count = std::min<int64_t>(kChunk, cols - first);
    float* const target = (float*)out + at + first;
    if (!brain && count % 16 == 0) {
      kind.decode(row, first, count, target);
      continue;
    }
    kind.decode(row, first, count, piece);
    if (brain)
      round_to_brains(piece, count, (uint16_t*)out + at + first);
    else
      std::memcpy(target, piece, count * sizeof(float));
  }
}

// sum[t][r] += pieces of `rows` decoded rows (kPiece apart) times pieces of `vectors` vectors (x_stride apart).
template <int rows, int vectors>
void tile(const float* w, const float* x, int64_t x_stride, int64_t count, float* sum, int64_t sum_stride) {
  Floats part[rows][vectors];
  for (int r = 0; r < rows; ++r)
    for (int t = 0; t < vectors; ++t) part[r][t] = splat(0.0f);
  for (int64_t i = 0; i + 16 <= count; i += 16) {
    Floats weights[rows];
    for (int r = 0; r < rows; ++r) weights[r] = load(w + r * kPiece + i);
    for (int t = 0; t < vectors; ++t) {
      const Floats activations = load(x + t * x_stride + i);
      for (int r = 0; r < rows; ++r) part[r][t] = fma(weights[r], activations, part[r][t]);
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int t = 0; t < vectors; ++t) {
      float rest = 0.0f;
      for (int64_t i = count / 16 * 16; i < count; ++i) rest += w[r * kPiece + i] * x[t * x_stride + i];
      sum[t * sum_stride + r] += total(part[r][t]) + rest;
    }
}

template <int rows>
void tiles(const float* w, const float* x, int64_t x_stride, int64_t vectors, int64_t count, float* sum, int64_t sum_stride) {
  int64_t t = 0;
  for (; t + kVectors <= vectors; t += kVectors) tile<rows, kVectors>(w, x + t * x_stride, x_stride, count, sum + t * sum_stride, sum_stride);
  for (; t < vectors; ++t) tile<rows, 1>(w, x + t * x_stride, x_stride, count, sum + t * sum_stride, sum_stride);
}

// out[t * m.rows + r] for rows [begin, end) of one matrix.
void product_rows(const Kind& kind, const Matrix& m, int64_t matrix, int64_t begin, int64_t end, const float* x, int64_t vectors, float* out) {
  alignas(64) float pieces[kTile * kPiece];
  const bool single = vectors == 1 && m.cols % kind.weights == 0;
  Row row[kTile];
  for (int64_t r = begin; r < end; r += kTile) {
    const int64_t rows = std::min<int64_t>(kTile, end - r);
    for (int64_t i = 0; i < rows; ++i) row[i] = row_of(m, matrix, r + i);
    for (int64_t t = 0; t < vectors; ++t) std::fill_n(out + t * m.rows + r, rows, 0.0f);
    for (int64_t first = 0; first < m.cols; first += kChunk) {
      const int64_t count = std::min<int64_t>(kChunk, m.cols - first);
      if (single && rows == kTile) {
        kind.dot(row, first, count, x + first, out + r);
        continue;
      }
      for (int64_t i = 0; i < rows; ++i) kind.decode(row[i], first, count, pieces + i * kPiece);
      if (rows == kTile) {
        tiles<kTile>(pieces, x + first, m.cols, vectors, count, out + r, m.rows);
      } else {
        for (int64_t i = 0; i < rows; ++i) tiles<1>(pieces + i * kPiece, x + first, m.cols, vectors, count, out + r + i, m.rows);
      }
    }
  }
}

int useful_threads(int threads, int64_t weights) { return (int)std::max<int64_t>(1, std::min<int64_t>(threads, weights / kWorthAThread)); }

// Calls body(begin, end) on pieces of [0, count) that begin at multiples of kTile, one per thread.
template <class Body>
void share(int64_t count, int threads, const Body& body) {
  if (threads == 1) return body(0, count);
  const int64_t piece = (count + (int64_t)threads * kTile - 1) / ((int64_t)threads * kTile) * kTile;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int i = 0; i < threads; ++i) {
    const int64_t begin = std::min(count, i * piece), end = std::min(count, begin + piece);
    if (begin < end) body(begin, end);
  }
}

}  // namespace
}  // namespace lab

using namespace lab;

extern "C" {

// Name of a kind, and its weights per block, bytes per block of part 0 and column multiple; null beyond the last kind.
const char* lab_kind(int number, int facts[3]) {
  const Kind* const found = find_kind(number);
  if (!found) return nullptr;
  facts[0] = found->weights, facts[1] = found->bytes, facts[2] = found->multiple;
  return found->name;
}

// out [count, rows, cols], float32 or bfloat16.
void lab_decode(const Matrix* m, void* out, int brain, int threads) {
  const Kind& kind = *find_kind(m->kind);
  const int64_t rows = m->count * m->rows;
  share(rows, useful_threads(threads, rows * m->cols), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) decode_row(kind, row_of(*m, r / m->rows, r % m->rows), m->cols, out, r * m->cols, brain);
  });
}

// x [vectors, cols] -> out [vectors, rows], by the stack's first matrix.
void lab_product(const Matrix* m, const float* x, int64_t vectors, float* out, int threads) {
  const Kind& kind = *find_kind(m->kind);
  share(m->rows, useful_threads(threads, m->rows * m->cols), [&](int64_t begin, int64_t end) {
    for (int64_t t = 0; t < vectors; t += kBatch)
      product_rows(kind, *m, 0, begin, end, x + t * m->cols, std::min(kBatch, vectors - t), out + t * m->rows);
  });
}

// x [slots, cols] -> out [slots, rows], each slot by its own matrix of the stack. Returns -1, or the first slot whose matrix is not there; then
// nothing is computed.
int64_t lab_expert_products(const Matrix* m, const int64_t* matrix, const float* x, int64_t slots, float* out, int threads) {
  for (int64_t s = 0; s < slots; ++s)
    if (matrix[s] < 0 || matrix[s] >= m->count) return s;
  const Kind& kind = *find_kind(m->kind);
  const int64_t groups = (m->rows + kTile - 1) / kTile;  // of rows, so that no piece cuts a tile
  share(slots * groups * kTile, useful_threads(threads, slots * m->rows * m->cols), [&](int64_t begin, int64_t end) {
    for (int64_t g = begin / kTile; g < end / kTile;) {
      const int64_t slot = g / groups, first = g % groups, last = std::min(groups, first + end / kTile - g);
      product_rows(kind, *m, matrix[slot], first * kTile, std::min(m->rows, last * kTile), x + slot * m->cols, 1, out + slot * m->rows);
      g += last - first;
    }
  });
  return -1;
}

}  // extern "C"
