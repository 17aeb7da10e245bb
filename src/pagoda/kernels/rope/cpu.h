// Rotary position embedding: dimension i of a head turns with dimension i + half by the token's angle.
#pragma once
#include <cmath>

#include "../common/simd.h"

namespace pagoda {
namespace PAGODA_ISA {

// cos and sin [half] of one position. Angles are taken in double: positions reach a million.
inline void rope_angles(int position, const double* inv_freq, int half, float factor, float* cosines, float* sines) {
  for (int i = 0; i < half; i++) {
    const double angle = static_cast<double>(position) * inv_freq[i];
    cosines[i] = static_cast<float>(::cos(angle)) * factor;
    sines[i] = static_cast<float>(::sin(angle)) * factor;
  }
}

// `out` may be `x`. Columns behind the rotated ones are copied.
inline void rope_row(const float* x, const float* cosines, const float* sines, int num_heads, int head_dim, int half, float* out) {
  for (int h = 0; h < num_heads; h++, x += head_dim, out += head_dim) {
    int i = 0;
    for (; i + 16 <= half; i += 16) {
      const f32x16 a = load16(x + i), b = load16(x + i + half), c = load16(cosines + i), s = load16(sines + i);
      store(out + i, sub(mul(a, c), mul(b, s)));
      store(out + i + half, add(mul(b, c), mul(a, s)));
    }
    for (; i < half; i++) {
      const float a = x[i], b = x[i + half];
      out[i] = a * cosines[i] - b * sines[i];
      out[i + half] = b * cosines[i] + a * sines[i];
    }
    for (i = 2 * half; i < head_dim; i++) out[i] = x[i];
  }
}

}  // namespace PAGODA_ISA
}  // namespace pagoda
