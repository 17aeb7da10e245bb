// y = x W^T on panels of weights that are not quantised. Float sums run over the inputs in order, for every tile
// shape, as those of quantised weights do.
//
// Weights in F32 and F16 are multiplied with floats. For BF16, activations are rounded to bf16 too (they lose less
// than in 8 bits), and products of pairs are added to a float sum, the second of a pair first: what processors with
// bf16 dot products do in one instruction, others in two FMAs.
#pragma once
#include "../common/kernel_table.h"
#include "../common/simd.h"

namespace pagoda {
namespace PAGODA_ISA {

// Results go to out[m][16 panel + lane] = sum + bias + residual.
PAGODA_INLINE void store_result(const LinearTarget& o, int row, int column, fpart sum) {
  if (o.bias) sum = add(sum, load(o.bias + column));
  if (o.residual) sum = add(sum, load(o.residual + static_cast<size_t>(row) * o.residual_stride + column));
  store(o.out + static_cast<size_t>(row) * o.stride + column, sum);
}

// Weights in floats: one FMA chain over the inputs.
template <Format F, int M>
inline void float_tile(const uint8_t* panel, int cols, const float* x, size_t stride, int row, int column, const LinearTarget& o) {
  f32x16 acc[M];
  for (int m = 0; m < M; m++) acc[m] = set16(0.0f);
  for (int c = 0; c < cols; c++) {
    const uint8_t* values = panel + block_bytes(F) * static_cast<size_t>(c);
    f32x16 w;
    if constexpr (F == Format::F32) w = load16(reinterpret_cast<const float*>(values));
    else w = load_half16(reinterpret_cast<const uint16_t*>(values));
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) acc[m] = fma(set16(x[static_cast<size_t>(m) * stride + static_cast<size_t>(c)]), w, acc[m]);
  }
  for (int m = 0; m < M; m++)
    for (int part = 0; part < NUM_PARTS; part++) store_result(o, row + m, column + PART * part, acc[m].part[part]);
}

template <Format F>
inline void float_panels(const PackedWeight& w, const float* x, size_t stride, int row0, int row1, int panel0, int panel1, const LinearTarget& o) {
  for (int p = panel0; p < panel1; p++) {
    int row = row0;
    for (; row + 4 <= row1; row += 4)
      float_tile<F, 4>(w.panel(p), w.cols, x + static_cast<size_t>(row) * stride, stride, row, PANEL * p, o);
    for (; row < row1; row++)
      float_tile<F, 1>(w.panel(p), w.cols, x + static_cast<size_t>(row) * stride, stride, row, PANEL * p, o);
  }
}

#if defined(PAGODA_ISA_AVX512)
constexpr int MAX_BF16_ROWS = 12;
#else
constexpr int MAX_BF16_ROWS = 4;
#endif
constexpr int BF16_PANELS = 16;     // that rows are rounded for at once
constexpr int BF16_INPUTS = 2048;   // of each row that are rounded at once
constexpr int BF16_AHEAD = 16384;   // bytes of weights asked for before they are multiplied
constexpr int BF16_STRIDE = BF16_INPUTS + 32;  // from row to row: 4 KiB would put all rows in one set of the cache

// To nearest even; NaN stays NaN.
PAGODA_INLINE uint16_t round_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

// sums[m][16 ..] += M rows of pairs times a panel's.
template <int M>
inline void bf16_tile(const uint8_t* panel, int num_pairs, const uint16_t* x, float* sums, size_t sums_stride) {
  fpart acc[M][NUM_PARTS];
  repeat<M>([&](auto m) __attribute__((always_inline)) {
    repeat<NUM_PARTS>([&](auto part) __attribute__((always_inline)) { acc[m][part] = load(sums + sums_stride * m + PART * part); });
  });
  for (int i = 0; i < num_pairs; i++, panel += block_bytes(Format::BF16)) {
    __builtin_prefetch(panel + BF16_AHEAD, 0, 2);
    ipart w[NUM_PARTS];
    repeat<NUM_PARTS>([&](auto part) __attribute__((always_inline)) { w[part] = load_ints(panel + 4 * PART * part); });
    repeat<M>([&](auto m) __attribute__((always_inline)) {
      int32_t both;
      std::memcpy(&both, x + BF16_STRIDE * m + 2 * i, 4);
      const ipart pair_of_x = iset(both);
      repeat<NUM_PARTS>([&](auto part) __attribute__((always_inline)) { acc[m][part] = dot2_bf16(acc[m][part], w[part], pair_of_x); });
    });
  }
  repeat<M>([&](auto m) __attribute__((always_inline)) {
    repeat<NUM_PARTS>([&](auto part) __attribute__((always_inline)) { store(sums + sums_stride * m + PART * part, acc[m][part]); });
  });
}

template <int M = MAX_BF16_ROWS>
inline void bf16_tile_of(int rows, const uint8_t* panel, int num_pairs, const uint16_t* x, float* sums, size_t sums_stride) {
  if constexpr (M > 1) if (rows < M) return bf16_tile_of<M - 1>(rows, panel, num_pairs, x, sums, sums_stride);
  bf16_tile<M>(panel, num_pairs, x, sums, sums_stride);
}

inline void bf16_panels(const PackedWeight& w, const float* x, size_t stride, int row0, int row1, int panel0, int panel1, const LinearTarget& o) {
  alignas(64) uint16_t rounded[MAX_BF16_ROWS * BF16_STRIDE];
  alignas(64) float sums[MAX_BF16_ROWS][BF16_PANELS * PANEL];
  for (int first = panel0; first < panel1; first += BF16_PANELS) {
    const int num_panels = panel1 - first < BF16_PANELS ? panel1 - first : BF16_PANELS;
    for (int row = row0; row < row1; row += MAX_BF16_ROWS) {
      const int num_rows = row1 - row < MAX_BF16_ROWS ? row1 - row : MAX_BF16_ROWS;
      for (int m = 0; m < num_rows; m++)
        for (int i = 0; i < num_panels * NUM_PARTS; i++) store(sums[m] + PART * i, set(0.0f));
      for (int column = 0; column < w.cols; column += BF16_INPUTS) {
        const int n = w.cols - column < BF16_INPUTS ? w.cols - column : BF16_INPUTS, num_pairs = (n + 1) / 2;
        for (int m = 0; m < num_rows; m++) {
          uint16_t* pairs = rounded + BF16_STRIDE * m;
          const float* values = x + static_cast<size_t>(row + m) * stride + static_cast<size_t>(column);
          for (int i = 0; i < n; i++) pairs[i] = round_to_bf16(values[i]);
          if (n % 2) pairs[n] = 0;
        }
        for (int p = 0; p < num_panels; p++)
          bf16_tile_of<>(num_rows, w.panel(first + p) + block_bytes(Format::BF16) * static_cast<size_t>(column / 2), num_pairs, rounded,
                         sums[0] + PANEL * p, BF16_PANELS * PANEL);
      }
      for (int m = 0; m < num_rows; m++)
        for (int i = 0; i < num_panels * NUM_PARTS; i++) store_result(o, row + m, PANEL * first + PART * i, load(sums[m] + PART * i));
    }
  }
}

}  // namespace PAGODA_ISA
}  // namespace pagoda
