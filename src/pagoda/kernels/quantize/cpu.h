// Activations to 8 bits, symmetric, one scale for each 32 values of a row, and a second plane of 8 bits for
// groups with outliers (after Dettmers et al. 2022, who keep outlier features in 16 bits). An eighth of the
// groups of a llama has them; the second plane there cuts the divergence from float32 activations by five
#pragma once
#include <cmath>

#include "../common/simd.h"
#include "../common/tensors.h"

namespace pagoda {
namespace PAGODA_ISA {

constexpr float OUTLIER_RATIO = 5.0f;  // of the largest value of a group to the root mean square of the row

// 32 values into one plane; `x` keeps what rounding lost.
PAGODA_INLINE void quantize_group(f32x16* x, float largest, const QuantPlane& plane, int group) {
  const float scale = largest / 127.0f;
  const f32x16 inverse = set16(largest > 0.0f ? 127.0f / largest : 0.0f);
  int32_t sums[2];
  for (int half = 0; half < 2; half++) {
    int8_t* q = plane.q + GROUP * group + 16 * half;
    const f32x16 scaled = mul(x[half], inverse);
    ipart sum = iset(0);
    for (int part = 0; part < NUM_PARTS; part++) {
      const ipart rounded = to_int(scaled.part[part]);
      store_i8(q + PART * part, rounded);
      sum = iadd(sum, rounded);
      x[half].part[part] = sub(x[half].part[part], mul(to_float(rounded), set(scale)));
    }
    sums[half] = reduce_add(sum);
  }
  plane.scale[group] = scale;
  plane.scaled_sum[group] = scale * static_cast<float>(sums[0] + sums[1]);
  plane.sums[2 * group] = sums[0];
  plane.sums[2 * group + 1] = sums[1];
}

inline void quantize_row(const float* x, const QuantRows& out, int row) {
  const QuantRows r = out.from_row(row);
  const int num_groups = r.cols / GROUP;
  f32x16 squares = set16(0.0f);
  for (int i = 0; i < r.cols; i += 16) squares = fma(load16(x + i), load16(x + i), squares);
  const float limit = OUTLIER_RATIO * sqrtf(reduce_add(squares) / static_cast<float>(r.cols));
  for (int g = 0; g < num_groups; g++) {
    f32x16 values[2] = {load16(x + GROUP * g), load16(x + GROUP * g + 16)};
    const float largest = reduce_max(max(abs(values[0]), abs(values[1])));
    quantize_group(values, largest, r.planes[0], g);
    const bool outlier = largest > limit;
    r.outlier[r.outlier_stride * static_cast<size_t>(g)] = outlier;
    if (outlier) {
      quantize_group(values, reduce_max(max(abs(values[0]), abs(values[1]))), r.planes[1], g);
    } else {
      r.planes[1].scale[g] = r.planes[1].scaled_sum[g] = 0.0f;
    }
  }
}

}  // namespace PAGODA_ISA
}  // namespace pagoda
