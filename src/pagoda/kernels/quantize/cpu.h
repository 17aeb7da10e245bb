// Activations to 8 bits, symmetric, one scale for each 32 values of a row, and outliers kept as floats (after
// Dettmers et al. 2022). A few channels of a llama are far larger than the rest of their row; each would set the
// scale of its group and cost the other 31 values most of their bits.
#pragma once
#include <cmath>

#include "../common/simd.h"
#include "../common/tensors.h"

namespace pagoda {
namespace PAGODA_ISA {

constexpr float OUTLIER_RATIO = 4.0f;  // of a value to the root mean square of its row

PAGODA_INLINE float root_mean_square(const float* x, int n) {
  f32x16 sums[2] = {set16(0.0f), set16(0.0f)};
  for (int i = 0; i < n; i += 32)
    for (int half = 0; half < 2; half++) sums[half] = fma(load16(x + i + 16 * half), load16(x + i + 16 * half), sums[half]);
  return sqrtf(reduce_add(add(sums[0], sums[1])) / static_cast<float>(n));
}

// Moves the outliers among 16 values to the row's list.
PAGODA_INLINE void take_outliers(f32x16& x, int first_column, float limit, const QuantRows& row) {
  int n = *row.num_outliers;
  float values[16];
  store(values, x);
  for (uint32_t lanes = lanes_above(abs(x), limit); lanes != 0 && n < QuantRows::max_outliers(row.cols); lanes &= lanes - 1, n++) {
    const int lane = __builtin_ctz(lanes);
    row.outlier_cols[n] = first_column + lane;
    row.outlier_values[n] = values[lane];
    values[lane] = 0.0f;
  }
  *row.num_outliers = n;
  x = load16(values);
}

inline void quantize_row(const float* x, const QuantRows& rows, int row) {
  const QuantRows r = rows.from_row(row);
  const float limit = OUTLIER_RATIO * root_mean_square(x, r.cols);
  *r.num_outliers = 0;
  for (int g = 0; g < r.cols / GROUP; g++) {
    f32x16 low = load16(x + GROUP * g), high = load16(x + GROUP * g + 16);
    float largest = reduce_max(max(abs(low), abs(high)));
    if (__builtin_expect(largest > limit, 0)) {
      take_outliers(low, GROUP * g, limit, r);
      take_outliers(high, GROUP * g + 16, limit, r);
      largest = reduce_max(max(abs(low), abs(high)));
    }
    const f32x16 inverse = set16(largest > 0.0f ? 127.0f / largest : 0.0f);
    r.scale[g] = largest / 127.0f;
    store_group(r.q + GROUP * g, to_int(mul(low, inverse)), to_int(mul(high, inverse)), r.half_offset + 2 * g);
  }
  for (int g = 0; g < r.cols / GROUP; g++) {  // store_group left sums
    int32_t* halves = r.half_offset + 2 * g;
    const int32_t sum = halves[0] + halves[1];
    r.scaled_sum[g] = r.scale[g] * static_cast<float>(sum);
    r.offset[g] = -128 * sum;
    for (int half = 0; half < 2; half++) halves[half] *= -32;
  }
}

}  // namespace PAGODA_ISA
}  // namespace pagoda
