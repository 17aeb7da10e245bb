// Gated activations: out = silu(gate) * up, or gelu(gate) * up with the tanh form of GELU.
#pragma once
#include "../common/simd.h"

namespace pagoda {
namespace PAGODA_ISA {

PAGODA_INLINE f32x16 silu(f32x16 x) { return div(x, add(set16(1.0f), exp(sub(set16(0.0f), x)))); }

// tanh(x) = 1 - 2 / (exp(2 x) + 1)
PAGODA_INLINE f32x16 tanh(f32x16 x) {
  return sub(set16(1.0f), div(set16(2.0f), add(exp(add(x, x)), set16(1.0f))));
}

PAGODA_INLINE f32x16 gelu_tanh(f32x16 x) {
  const f32x16 inner = mul(mul(set16(0.79788456f), x), fma(mul(x, x), set16(0.044715f), set16(1.0f)));
  return mul(mul(set16(0.5f), x), add(set16(1.0f), tanh(inner)));
}

inline void gated_row(const float* gate, const float* up, int width, bool gelu, float* out) {
  int i = 0;
  for (; i + 16 <= width; i += 16) {
    const f32x16 g = load16(gate + i);
    store(out + i, mul(gelu ? gelu_tanh(g) : silu(g), load16(up + i)));
  }
  if (i < width) {
    const f32x16 g = load_first(gate + i, width - i);
    store_first(out + i, mul(gelu ? gelu_tanh(g) : silu(g), load_first(up + i, width - i)), width - i);
  }
}

inline void gelu_row(const float* x, int width, float* out) {
  int i = 0;
  for (; i + 16 <= width; i += 16) store(out + i, gelu_tanh(load16(x + i)));
  if (i < width) store_first(out + i, gelu_tanh(load_first(x + i, width - i)), width - i);
}

inline void add_row(const float* a, const float* b, int width, float* out) {
  int i = 0;
  for (; i + 16 <= width; i += 16) store(out + i, add(load16(a + i), load16(b + i)));
  for (; i < width; i++) out[i] = a[i] + b[i];
}

// x = cap * tanh(x / cap)
PAGODA_INLINE f32x16 softcap(f32x16 x, float cap) { return mul(tanh(mul(x, set16(1.0f / cap))), set16(cap)); }

inline void softcap_row(float* x, int width, float cap) {
  int i = 0;
  for (; i + 16 <= width; i += 16) store(x + i, softcap(load16(x + i), cap));
  if (i < width) store_first(x + i, softcap(load_first(x + i, width - i), cap), width - i);
}

}  // namespace PAGODA_ISA
}  // namespace pagoda
