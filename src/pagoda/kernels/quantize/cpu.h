// Activations to 8 bits, symmetric, one scale for each 32 values of a row, and outliers kept as floats (after
// Dettmers et al. 2022). A few channels of a llama are far larger than the rest of their row; each would set the
// scale of its group and cost the other 31 values most of their bits.
#pragma once
#include <cmath>

#include "../common/simd.h"
#include "../common/tensors.h"

namespace pagoda {
namespace PAGODA_ISA {

constexpr float OUTLIER_RATIO = 5.0f;  // of a value to the root mean square of its row

PAGODA_INLINE float root_mean_square(const float* x, int n) {
  f32x16 sums[2] = {set16(0.0f), set16(0.0f)};
  for (int i = 0; i < n; i += 32)
    for (int half = 0; half < 2; half++) sums[half] = fma(load16(x + i + 16 * half), load16(x + i + 16 * half), sums[half]);
  return sqrtf(reduce_add(add(sums[0], sums[1])) / static_cast<float>(n));
}

// Moves the outliers of a group from `x` [32] to the row's list.
__attribute__((noinline)) inline void take_outliers(const float* x, int first_column, float limit, const QuantRows& row, f32x16* rest) {
  alignas(64) float kept[GROUP];
  int& n = *row.num_outliers;
  for (int i = 0; i < GROUP; i++) {
    kept[i] = x[i];
    if (!(fabsf(x[i]) > limit) || n == QuantRows::max_outliers(row.cols)) continue;
    row.outlier_cols[n] = first_column + i;
    row.outlier_values[n] = x[i];
    kept[i] = 0.0f;
    n++;
  }
  rest[0] = load16(kept);
  rest[1] = load16(kept + 16);
}

inline void quantize_row(const float* x, const QuantRows& rows, int row) {
  const QuantRows r = rows.from_row(row);
  const float limit = OUTLIER_RATIO * root_mean_square(x, r.cols);
  *r.num_outliers = 0;
  for (int g = 0; g < r.cols / GROUP; g++) {
    f32x16 values[2] = {load16(x + GROUP * g), load16(x + GROUP * g + 16)};
    float largest = reduce_max(max(abs(values[0]), abs(values[1])));
    if (__builtin_expect(largest > limit, 0)) {
      take_outliers(x + GROUP * g, GROUP * g, limit, r, values);
      largest = reduce_max(max(abs(values[0]), abs(values[1])));
    }
    const f32x16 inverse = set16(largest > 0.0f ? 127.0f / largest : 0.0f);
    int8_t* q = r.q + GROUP * g;
    for (int half = 0; half < 2; half++)
      for (int part = 0; part < NUM_PARTS; part++)
        store_i8(q + 16 * half + PART * part, to_int(mul(values[half].part[part], inverse.part[part])));
    r.scale[g] = largest / 127.0f;
    sum_halves(q, r.sums + 2 * g);
    r.scaled_sum[g] = r.scale[g] * static_cast<float>(r.sums[2 * g] + r.sums[2 * g + 1]);
  }
}

}  // namespace PAGODA_ISA
}  // namespace pagoda
