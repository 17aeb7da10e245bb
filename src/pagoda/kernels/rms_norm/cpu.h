// Root-mean-square normalisation of each run of `width` columns. Sums of squares keep 16 partial sums.
#pragma once
#include <cmath>

#include "../common/simd.h"

namespace pagoda {
namespace PAGODA_ISA {

inline void rms_norm_row(const float* x, const float* weight, float eps, int row_width, int width, float* out) {
  for (int start = 0; start < row_width; start += width, x += width, out += width) {
    f32x16 sum = set16(0.0f);
    int i = 0;
    for (; i + 16 <= width; i += 16) sum = fma(load16(x + i), load16(x + i), sum);
    if (i < width) {
      const f32x16 tail = load_first(x + i, width - i);
      sum = fma(tail, tail, sum);
    }
    const f32x16 scale = set16(1.0f / sqrtf(reduce_add(sum) / static_cast<float>(width) + eps));
    i = 0;
    for (; i + 16 <= width; i += 16) store(out + i, mul(mul(load16(x + i), scale), load16(weight + i)));
    if (i < width) store_first(out + i, mul(mul(load_first(x + i, width - i), scale), load_first(weight + i, width - i)), width - i);
  }
}

}  // namespace PAGODA_ISA
}  // namespace pagoda
