// Activations to 8 bits, symmetric, one scale for each 32 values of a row.
#pragma once
#include "../common/simd.h"
#include "../common/tensors.h"

namespace pagoda {
namespace PAGODA_ISA {

inline void quantize_row(const float* x, const QuantRows& out, int row) {
  const QuantRows r = out.from_row(row);
  for (int g = 0; g < r.cols / GROUP; g++) {
    const f32x16 a = load16(x + GROUP * g), b = load16(x + GROUP * g + 16);
    const float largest = reduce_max(max(abs(a), abs(b)));
    const f32x16 inverse = set16(largest > 0.0f ? 127.0f / largest : 0.0f);
    const f32x16 scaled[2] = {mul(a, inverse), mul(b, inverse)};
    int32_t sums[2] = {0, 0};
    for (int half = 0; half < 2; half++) {
      int8_t* q = r.q + GROUP * g + 16 * half;
      for (int part = 0; part < NUM_PARTS; part++) store_i8(q + PART * part, to_int(scaled[half].part[part]));
      for (int i = 0; i < 16; i++) sums[half] += q[i];
    }
    r.scale[g] = largest / 127.0f;
    r.scaled_sum[g] = r.scale[g] * static_cast<float>(sums[0] + sums[1]);
    r.sums[2 * g] = sums[0];
    r.sums[2 * g + 1] = sums[1];
  }
}

}  // namespace PAGODA_ISA
}  // namespace pagoda
