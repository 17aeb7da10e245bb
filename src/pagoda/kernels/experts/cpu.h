// Which experts a token goes to, and the sum of what they make of it.
#pragma once
#include "../common/simd.h"

namespace pagoda {
namespace PAGODA_ISA {

// The `num_active` largest of `num_experts` scores, largest first (ties: lowest index), and their softmax weights:
// among each other if `normalised`, among all if not.
inline void route_row(const float* scores, int num_experts, int num_active, bool normalised, int32_t* experts, float* weights) {
  for (int e = 0, count = 0; e < num_experts; e++) {
    if (count == num_active && !(scores[e] > scores[experts[count - 1]])) continue;
    if (count < num_active) count++;
    int k = count - 1;
    for (; k > 0 && scores[e] > scores[experts[k - 1]]; k--) experts[k] = experts[k - 1];
    experts[k] = e;
  }
  const f32x16 largest = set16(scores[experts[0]]);
  f32x16 sum = set16(0.0f);
  for (int i = 0; i < num_experts; i += 16) {
    const int n = num_experts - i < 16 ? num_experts - i : 16;
    alignas(64) float lanes[16];
    store(lanes, keep_range(exp(sub(load_first(scores + i, n), largest)), 0, 0, n, 0.0f));
    for (int k = 0; k < num_active; k++)
      if (experts[k] >= i && experts[k] < i + 16) weights[k] = lanes[experts[k] - i];
    sum = add(sum, load16(lanes));
  }
  float total = 0.0f;
  if (normalised) for (int k = 0; k < num_active; k++) total += weights[k];
  else total = reduce_add(sum);
  for (int k = 0; k < num_active; k++) weights[k] = weights[k] / total;
}

// out = first ? weight * x : out + weight * x
inline void add_weighted_row(const float* x, float weight, int width, bool first, float* out) {
  const f32x16 w = set16(weight);
  int i = 0;
  for (; i + 16 <= width; i += 16) store(out + i, first ? mul(load16(x + i), w) : fma(load16(x + i), w, load16(out + i)));
  if (i < width) {
    const f32x16 v = load_first(x + i, width - i);
    store_first(out + i, first ? mul(v, w) : fma(v, w, load_first(out + i, width - i)), width - i);
  }
}

}  // namespace PAGODA_ISA
}  // namespace pagoda
