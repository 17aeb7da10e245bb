// Layer normalisation of a row. The mean is taken off before squares are summed, each sum in 16 partial sums.
#pragma once
#include <cmath>

#include "../common/simd.h"

namespace pagoda {
namespace PAGODA_ISA {

inline void layer_norm_row(const float* x, const float* weight, const float* bias, float eps, int width, float* out) {
  const int whole = width / 16 * 16, rest = width - whole;
  f32x16 sum = set16(0.0f);
  for (int i = 0; i < whole; i += 16) sum = add(sum, load16(x + i));
  if (rest) sum = add(sum, load_first(x + whole, rest));
  const f32x16 mean = set16(reduce_add(sum) / static_cast<float>(width));
  f32x16 squares = set16(0.0f);
  for (int i = 0; i < whole; i += 16) {
    const f32x16 centred = sub(load16(x + i), mean);
    squares = fma(centred, centred, squares);
  }
  if (rest) {
    const f32x16 centred = keep_range(sub(load_first(x + whole, rest), mean), 0, 0, rest, 0.0f);
    squares = fma(centred, centred, squares);
  }
  const f32x16 scale = set16(1.0f / sqrtf(reduce_add(squares) / static_cast<float>(width) + eps));
  for (int i = 0; i < whole; i += 16) store(out + i, fma(mul(sub(load16(x + i), mean), scale), load16(weight + i), load16(bias + i)));
  if (rest)
    store_first(out + whole, fma(mul(sub(load_first(x + whole, rest), mean), scale), load_first(weight + whole, rest), load_first(bias + whole, rest)), rest);
}

}  // namespace PAGODA_ISA
}  // namespace pagoda
