// What the machine can do at best, measured with the same primitives as the kernels.
#pragma once
#include "simd.h"

#if defined(PAGODA_ISA_AVX512) && !defined(PAGODA_EMULATE_AVX512)
#define PAGODA_REGISTER "+v"
#elif defined(PAGODA_EMULATE_AVX512)
#define PAGODA_REGISTER "+m"
#elif defined(__AVX2__)
#define PAGODA_REGISTER "+x"
#elif defined(PAGODA_ISA_NEON)
#define PAGODA_REGISTER "+w"
#endif

namespace pagoda {
namespace PAGODA_ISA {

// Byte dot products on registers only. Returns how many multiplications and additions one round does.
inline double dot_rounds(int rounds, int32_t* sink) {
  constexpr int CHAINS = 8;
  const int8_t ones[4] = {1, 1, 1, 1};
  bpart w = broadcast4(ones);
  const bpart x = w;
  ipart sum[CHAINS];
  for (int c = 0; c < CHAINS; c++) sum[c] = iset(c);  // unequal, or one chain would do for all
  for (int r = 0; r < rounds; r++) {
#pragma GCC unroll 8
    for (int c = 0; c < CHAINS; c++) sum[c] = dot4(sum[c], w, x, false);
#if defined(PAGODA_REGISTER)
    asm volatile("" : PAGODA_REGISTER(w));  // or the compiler sees that every round adds the same
#endif
  }
  float lanes[PART];
  for (int c = 0; c < CHAINS; c++) {
    store(lanes, to_float(widen(sum[c])));
    *sink += static_cast<int32_t>(lanes[0]);
  }
  return 2.0 * 4 * PART * CHAINS;
}

}  // namespace PAGODA_ISA
}  // namespace pagoda
