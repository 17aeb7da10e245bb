// One vector vocabulary for every instruction set, so that a kernel is written once.
//
// A translation unit compiles this file for one instruction set (PAGODA_ISA names it and is the inner
// namespace), whose own file supplies primitives; simd_portable.h says in plain C++ what they mean. `fpart` is
// the machine's float vector of PART lanes, `ipart` as many int32, `bpart` four bytes a lane; `f32x16` is always 16
// lanes, made of 16 / PART parts. Every operation below rounds the same way on every instruction set, FMA
// included, and sums over lanes follow one fixed tree, so results are bitwise equal across instruction sets.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "half.h"

#if defined(__AVX2__) || defined(PAGODA_ISA_NEON)
#define PAGODA_INLINE inline __attribute__((always_inline))
#else
#define PAGODA_INLINE inline  // portable vectors are arrays: inlining every loop over them takes minutes to compile
#endif

#if defined(PAGODA_ISA_AVX512)
#include "simd_avx512.h"
#elif defined(PAGODA_ISA_AVX2) || defined(PAGODA_ISA_AVX2_VNNI)
#include "simd_avx2.h"
#elif defined(PAGODA_ISA_NEON)
#include "simd_neon.h"
#else
#include "simd_portable.h"
#endif

namespace pagoda {
namespace PAGODA_ISA {

constexpr int NUM_PARTS = 16 / PART;
constexpr float LOG2_E = 1.44269504f;

// Each lane of `sum` gains the products of two pairs of bf16, the second first.
PAGODA_INLINE fpart dot2_bf16(fpart sum, ipart a, ipart b) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#else
  const auto second = [](ipart pair) { return bits_as_float(iand(pair, static_cast<int32_t>(0xffff0000))); };
  const auto first = [](ipart pair) { return bits_as_float(shift_up(pair, 16)); };
  return fma(first(a), first(b), fma(second(a), second(b), sum));
#endif
}

// exp(x): 2^n * p(f) with n = round(x log2 e) and a degree-6 polynomial on |f| <= ln2 / 2 (Cody & Waite 1980).
// Relative error under 2e-7; exactly 0 for x below -87, so a masked score of -inf has no weight.
PAGODA_INLINE fpart exp(fpart x) {
  const fpart low = set(-87.0f);
  const fpart clamped = min(max(x, low), set(88.0f));
  const fpart n = to_float(to_int(mul(clamped, set(LOG2_E))));
  const fpart f = fma(n, set(2.12194440e-4f), fma(n, set(-0.693359375f), clamped));
  fpart p = set(1.9875691500e-4f);
  p = fma(p, f, set(1.3981999507e-3f));
  p = fma(p, f, set(8.3334519073e-3f));
  p = fma(p, f, set(4.1665795894e-2f));
  p = fma(p, f, set(1.6666665459e-1f));
  p = fma(p, f, set(5.0000001201e-1f));
  p = add(fma(p, mul(f, f), f), set(1.0f));
  return zero_below(x, low, mul(p, exp2_int(to_int(n))));
}

// 2^x for x <= 0, at least 2^-120: 2^n * p(f) with n = round(x), found by adding 1.5 * 2^23, and a minimax polynomial
// on |f| <= 1/2. Relative error under 2e-7.
PAGODA_INLINE fpart exp2_of_negative(fpart x) {
  const fpart magic = set(12582912.0f), clamped = max(x, set(-120.0f)), rounded = add(clamped, magic);
  const fpart f = sub(clamped, sub(rounded, magic));
  fpart p = set(1.327647245e-3f);
  p = fma(p, f, set(9.675540961e-3f));
  p = fma(p, f, set(5.550713092e-2f));
  p = fma(p, f, set(2.402212024e-1f));
  p = fma(p, f, set(6.931469440e-1f));
  p = fma(p, f, set(1.0f));
  return scale_by_rounded(p, rounded);
}

// ---- 16 lanes whatever the machine ----

struct f32x16 {
  fpart part[NUM_PARTS];
};

#define PAGODA_PARTS _Pragma("GCC unroll 4") for (int i = 0; i < NUM_PARTS; i++)
PAGODA_INLINE f32x16 load16(const float* p) { f32x16 r; PAGODA_PARTS r.part[i] = load(p + PART * i); return r; }
PAGODA_INLINE void store(float* p, f32x16 v) { PAGODA_PARTS store(p + PART * i, v.part[i]); }
PAGODA_INLINE f32x16 set16(float x) { f32x16 r; PAGODA_PARTS r.part[i] = set(x); return r; }
PAGODA_INLINE f32x16 load_half16(const uint16_t* p) { f32x16 r; PAGODA_PARTS r.part[i] = load_half(p + PART * i); return r; }
PAGODA_INLINE f32x16 add(f32x16 a, f32x16 b) { PAGODA_PARTS a.part[i] = add(a.part[i], b.part[i]); return a; }
PAGODA_INLINE f32x16 sub(f32x16 a, f32x16 b) { PAGODA_PARTS a.part[i] = sub(a.part[i], b.part[i]); return a; }
PAGODA_INLINE f32x16 mul(f32x16 a, f32x16 b) { PAGODA_PARTS a.part[i] = mul(a.part[i], b.part[i]); return a; }
PAGODA_INLINE f32x16 div(f32x16 a, f32x16 b) { PAGODA_PARTS a.part[i] = div(a.part[i], b.part[i]); return a; }
PAGODA_INLINE f32x16 max(f32x16 a, f32x16 b) { PAGODA_PARTS a.part[i] = max(a.part[i], b.part[i]); return a; }
PAGODA_INLINE f32x16 min(f32x16 a, f32x16 b) { PAGODA_PARTS a.part[i] = min(a.part[i], b.part[i]); return a; }
PAGODA_INLINE f32x16 abs(f32x16 a) { PAGODA_PARTS a.part[i] = abs(a.part[i]); return a; }
PAGODA_INLINE f32x16 exp(f32x16 a) { PAGODA_PARTS a.part[i] = exp(a.part[i]); return a; }
PAGODA_INLINE f32x16 exp2_of_negative(f32x16 a) { PAGODA_PARTS a.part[i] = exp2_of_negative(a.part[i]); return a; }
PAGODA_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  PAGODA_PARTS c.part[i] = fma(a.part[i], b.part[i], c.part[i]);
  return c;
}
PAGODA_INLINE uint32_t lanes_above(f32x16 x, float limit) {
  uint32_t lanes = 0;
  PAGODA_PARTS lanes |= lanes_above(x.part[i], limit) << (PART * i);
  return lanes;
}
PAGODA_INLINE f32x16 keep_range(f32x16 x, int first_index, int low, int high, float fill) {
  PAGODA_PARTS x.part[i] = keep_range(x.part[i], first_index + PART * i, low, high, fill);
  return x;
}

struct i32x16 {
  ipart part[NUM_PARTS];
};
PAGODA_INLINE i32x16 to_int(f32x16 a) { i32x16 r; PAGODA_PARTS r.part[i] = to_int(a.part[i]); return r; }
PAGODA_INLINE void store_i16(int16_t* p, i32x16 v) { PAGODA_PARTS store_i16(p + PART * i, v.part[i]); }
#undef PAGODA_PARTS

// f(0), f(1) ... f(N - 1) with constants.
template <class F, int... I>
PAGODA_INLINE void repeat(F f, std::integer_sequence<int, I...>) { (f(std::integral_constant<int, I>{}), ...); }
template <int N, class F>
PAGODA_INLINE void repeat(F f) { repeat(f, std::make_integer_sequence<int, N>{}); }

// The first n < 16 values, the other lanes 0, without touching memory behind them.
PAGODA_INLINE f32x16 load_first(const float* p, int n) {
  alignas(64) float x[16] = {};
  for (int i = 0; i < n; i++) x[i] = p[i];
  return load16(x);
}
// The first n pairs, the other lanes 0.
PAGODA_INLINE ipart load_ints_first(const int16_t* p, int n) {
  alignas(64) int16_t x[2 * PART] = {};
  for (int i = 0; i < 2 * n && i < 2 * PART; i++) x[i] = p[i];
  return load_ints(x);
}
PAGODA_INLINE void store_first(float* p, f32x16 v, int n) {
  alignas(64) float x[16];
  store(x, v);
  for (int i = 0; i < n; i++) p[i] = x[i];
}

}  // namespace PAGODA_ISA
}  // namespace pagoda

#include "simd_across.h"
