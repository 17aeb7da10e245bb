// One vector vocabulary for every instruction set, so that a kernel is written once.
//
// A translation unit compiles this file for one instruction set (PAGODA_ISA names it and is the inner
// namespace). `fpart` is the machine's own float vector of PART lanes; `f32x16` is always 16 lanes, made of
// 16 / PART parts. Every operation below rounds the same way on every instruction set, FMA included, and
// sums over lanes follow one fixed tree, so results are bitwise equal across instruction sets.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "half.h"

#if defined(PAGODA_ISA_AVX512) || defined(PAGODA_ISA_AVX2) || defined(PAGODA_ISA_AVX2_VNNI)
#ifdef PAGODA_EMULATE_AVX512
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>
#include "emulated_avx512.h"
#else
#include <immintrin.h>
#endif
#endif

#if defined(__AVX2__)
#define PAGODA_INLINE inline __attribute__((always_inline))
#else
#define PAGODA_INLINE inline  // portable vectors are arrays: inlining every loop over them takes minutes to compile
#endif

namespace pagoda {
namespace PAGODA_ISA {

#if defined(PAGODA_ISA_AVX512)

constexpr int PART = 16;
using fpart = __m512;
using ipart = __m512i;
using bpart = __m512i;  // 4 * PART bytes

PAGODA_INLINE fpart load(const float* p) { return _mm512_loadu_ps(p); }
PAGODA_INLINE void store(float* p, fpart v) { _mm512_storeu_ps(p, v); }
PAGODA_INLINE fpart set(float x) { return _mm512_set1_ps(x); }
PAGODA_INLINE fpart add(fpart a, fpart b) { return _mm512_add_ps(a, b); }
PAGODA_INLINE fpart sub(fpart a, fpart b) { return _mm512_sub_ps(a, b); }
PAGODA_INLINE fpart mul(fpart a, fpart b) { return _mm512_mul_ps(a, b); }
PAGODA_INLINE fpart div(fpart a, fpart b) { return _mm512_div_ps(a, b); }
PAGODA_INLINE fpart fma(fpart a, fpart b, fpart c) { return _mm512_fmadd_ps(a, b, c); }
PAGODA_INLINE fpart max(fpart a, fpart b) { return _mm512_max_ps(a, b); }
PAGODA_INLINE fpart min(fpart a, fpart b) { return _mm512_min_ps(a, b); }
PAGODA_INLINE fpart abs(fpart a) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff)));
}
PAGODA_INLINE fpart load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
PAGODA_INLINE fpart load_bfloat(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
PAGODA_INLINE fpart load_u8(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
PAGODA_INLINE fpart load_i8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
PAGODA_INLINE fpart to_float(ipart a) { return _mm512_cvtepi32_ps(a); }
PAGODA_INLINE ipart to_int(fpart a) { return _mm512_cvtps_epi32(a); }
PAGODA_INLINE ipart iset(int32_t x) { return _mm512_set1_epi32(x); }
PAGODA_INLINE ipart isub(ipart a, ipart b) { return _mm512_sub_epi32(a, b); }
PAGODA_INLINE ipart iadd(ipart a, ipart b) { return _mm512_add_epi32(a, b); }
PAGODA_INLINE ipart load_ints(const void* p) { return _mm512_loadu_si512(p); }
PAGODA_INLINE ipart iand(ipart a, int32_t mask) { return _mm512_and_si512(a, _mm512_set1_epi32(mask)); }
PAGODA_INLINE ipart shift_down(ipart a, int bits) { return _mm512_srl_epi32(a, _mm_cvtsi32_si128(bits)); }
PAGODA_INLINE ipart shift_up(ipart a, int bits) { return _mm512_sll_epi32(a, _mm_cvtsi32_si128(bits)); }
PAGODA_INLINE ipart sign_of_top_byte(ipart a) { return _mm512_srai_epi32(a, 24); }
PAGODA_INLINE void store_i16(int16_t* p, ipart v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(v));
}
// Each int32 lane of `sum` gains the dot product of two pairs of int16.
PAGODA_INLINE ipart dot2(ipart sum, ipart a, ipart b) { return _mm512_dpwssd_epi32(sum, a, b); }
// 2^n for integers n in [-126, 127], by building the exponent.
PAGODA_INLINE fpart exp2_int(ipart n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}
// x * 2^n, for a normal result; n lies in the low bits of `rounded` = n + 1.5 * 2^23.
PAGODA_INLINE fpart scale_by_rounded(fpart x, fpart rounded) {
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_slli_epi32(_mm512_castps_si512(rounded), 23)));
}
PAGODA_INLINE fpart zero_below(fpart x, fpart limit, fpart value) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_GE_OQ), value);
}
PAGODA_INLINE uint32_t lanes_above(fpart x, float limit) { return _mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_GT_OQ); }
// Lanes whose index (first_index + lane) lies outside [low, high) become `fill`.
PAGODA_INLINE fpart keep_range(fpart x, int first_index, int low, int high, float fill) {
  const __m512i index = _mm512_add_epi32(
      _mm512_set1_epi32(first_index), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  const __mmask16 inside = static_cast<__mmask16>(_mm512_cmpgt_epi32_mask(index, _mm512_set1_epi32(low - 1)) &
                                                  _mm512_cmpgt_epi32_mask(_mm512_set1_epi32(high), index));
  return _mm512_mask_mov_ps(_mm512_set1_ps(fill), inside, x);
}
PAGODA_INLINE bpart load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
PAGODA_INLINE bpart low_nibbles(bpart b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
template <int S>
PAGODA_INLINE bpart shift_right(bpart b) { return _mm512_srli_epi16(b, S); }
template <int S>
PAGODA_INLINE bpart shift_left(bpart b) { return _mm512_slli_epi16(b, S); }
PAGODA_INLINE bpart or_masked(bpart b, bpart bits, int8_t mask) {
  return _mm512_or_si512(b, _mm512_and_si512(bits, _mm512_set1_epi8(mask)));
}
PAGODA_INLINE bpart broadcast4(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return _mm512_set1_epi32(four);
}
// Each int32 lane of `sum` gains the dot product of four unsigned weights with four signed bytes of x.
template <int MAX_WEIGHT>
constexpr int SUMS_IN_16_BITS = 8;  // no 16-bit sums here: products go straight to int32
PAGODA_INLINE ipart dot4(ipart sum, bpart w, bpart x, bool first) {
  return _mm512_dpbusd_epi32(first ? _mm512_setzero_si512() : sum, w, x);
}
// Signed weights are made unsigned by adding 128: sums start from -128 times the sum of x.
constexpr bool DOTS_ARE_INT32 = true, SIGNED_IS_OFFSET = true;
PAGODA_INLINE ipart dot4_signed(ipart sum, bpart w, bpart x, bool first) {
  return dot4(sum, _mm512_xor_si512(w, _mm512_set1_epi8(-128)), x, first);
}
PAGODA_INLINE ipart widen(ipart sum) { return sum; }

#elif defined(PAGODA_ISA_AVX2) || defined(PAGODA_ISA_AVX2_VNNI)

constexpr int PART = 8;
using fpart = __m256;
using ipart = __m256i;
using bpart = __m256i;

PAGODA_INLINE fpart load(const float* p) { return _mm256_loadu_ps(p); }
PAGODA_INLINE void store(float* p, fpart v) { _mm256_storeu_ps(p, v); }
PAGODA_INLINE fpart set(float x) { return _mm256_set1_ps(x); }
PAGODA_INLINE fpart add(fpart a, fpart b) { return _mm256_add_ps(a, b); }
PAGODA_INLINE fpart sub(fpart a, fpart b) { return _mm256_sub_ps(a, b); }
PAGODA_INLINE fpart mul(fpart a, fpart b) { return _mm256_mul_ps(a, b); }
PAGODA_INLINE fpart div(fpart a, fpart b) { return _mm256_div_ps(a, b); }
PAGODA_INLINE fpart fma(fpart a, fpart b, fpart c) { return _mm256_fmadd_ps(a, b, c); }
PAGODA_INLINE fpart max(fpart a, fpart b) { return _mm256_max_ps(a, b); }
PAGODA_INLINE fpart min(fpart a, fpart b) { return _mm256_min_ps(a, b); }
PAGODA_INLINE fpart abs(fpart a) { return _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff))); }
PAGODA_INLINE fpart load_half(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
PAGODA_INLINE fpart load_bfloat(const uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
PAGODA_INLINE fpart load_u8(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
PAGODA_INLINE fpart load_i8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
PAGODA_INLINE fpart to_float(ipart a) { return _mm256_cvtepi32_ps(a); }
PAGODA_INLINE ipart to_int(fpart a) { return _mm256_cvtps_epi32(a); }
PAGODA_INLINE ipart iset(int32_t x) { return _mm256_set1_epi32(x); }
PAGODA_INLINE ipart isub(ipart a, ipart b) { return _mm256_sub_epi32(a, b); }
PAGODA_INLINE ipart iadd(ipart a, ipart b) { return _mm256_add_epi32(a, b); }
PAGODA_INLINE ipart load_ints(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
PAGODA_INLINE ipart iand(ipart a, int32_t mask) { return _mm256_and_si256(a, _mm256_set1_epi32(mask)); }
PAGODA_INLINE ipart shift_down(ipart a, int bits) { return _mm256_srl_epi32(a, _mm_cvtsi32_si128(bits)); }
PAGODA_INLINE ipart shift_up(ipart a, int bits) { return _mm256_sll_epi32(a, _mm_cvtsi32_si128(bits)); }
PAGODA_INLINE ipart sign_of_top_byte(ipart a) { return _mm256_srai_epi32(a, 24); }
PAGODA_INLINE void store_i16(int16_t* p, ipart v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
}
#if defined(PAGODA_ISA_AVX2_VNNI)
PAGODA_INLINE ipart dot2(ipart sum, ipart a, ipart b) { return _mm256_dpwssd_avx_epi32(sum, a, b); }
#else
PAGODA_INLINE ipart dot2(ipart sum, ipart a, ipart b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
#endif
PAGODA_INLINE fpart exp2_int(ipart n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
PAGODA_INLINE fpart scale_by_rounded(fpart x, fpart rounded) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_castps_si256(rounded), 23)));
}
PAGODA_INLINE fpart zero_below(fpart x, fpart limit, fpart value) {
  return _mm256_and_ps(_mm256_cmp_ps(x, limit, _CMP_GE_OQ), value);
}
PAGODA_INLINE uint32_t lanes_above(fpart x, float limit) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_GT_OQ)));
}
PAGODA_INLINE fpart keep_range(fpart x, int first_index, int low, int high, float fill) {
  const __m256i index = _mm256_add_epi32(_mm256_set1_epi32(first_index), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  const __m256i inside = _mm256_and_si256(_mm256_cmpgt_epi32(index, _mm256_set1_epi32(low - 1)),
                                          _mm256_cmpgt_epi32(_mm256_set1_epi32(high), index));
  return _mm256_blendv_ps(_mm256_set1_ps(fill), x, _mm256_castsi256_ps(inside));
}
PAGODA_INLINE bpart load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
PAGODA_INLINE bpart low_nibbles(bpart b) { return _mm256_and_si256(b, _mm256_set1_epi8(15)); }
template <int S>
PAGODA_INLINE bpart shift_right(bpart b) { return _mm256_srli_epi16(b, S); }
template <int S>
PAGODA_INLINE bpart shift_left(bpart b) { return _mm256_slli_epi16(b, S); }
PAGODA_INLINE bpart or_masked(bpart b, bpart bits, int8_t mask) {
  return _mm256_or_si256(b, _mm256_and_si256(bits, _mm256_set1_epi8(mask)));
}
PAGODA_INLINE bpart broadcast4(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return _mm256_set1_epi32(four);
}

#if defined(PAGODA_ISA_AVX2_VNNI)
template <int MAX_WEIGHT>
constexpr int SUMS_IN_16_BITS = 8;
PAGODA_INLINE ipart dot4(ipart sum, bpart w, bpart x, bool first) {
  return _mm256_dpbusd_avx_epi32(first ? _mm256_setzero_si256() : sum, w, x);
}
PAGODA_INLINE ipart dot4_signed(ipart sum, bpart w, bpart x, bool first) {
  return dot4(sum, _mm256_xor_si256(w, _mm256_set1_epi8(-128)), x, first);
}
PAGODA_INLINE ipart widen(ipart sum) { return sum; }
constexpr bool DOTS_ARE_INT32 = true, SIGNED_IS_OFFSET = true;
#else
// Without VNNI, pairs of products are summed in int16. With |x| <= 127 this many pairs fit before they have
// to be widened to int32: all eight of a group for 4-bit weights, one for signed bytes (|w| <= 128).
template <int MAX_WEIGHT>
constexpr int SUMS_IN_16_BITS = MAX_WEIGHT >= 128 ? 1 : MAX_WEIGHT >= 63 ? 2 : MAX_WEIGHT >= 31 ? 4 : 8;
static_assert(127 * 2 * (8 * 15) <= 32767 && 127 * 2 * (4 * 31) <= 32767 && 127 * 2 * (2 * 63) <= 32767 && 127 * 2 * 128 <= 32767);
PAGODA_INLINE ipart dot4(ipart sum, bpart w, bpart x, bool first) {
  const __m256i pairs = _mm256_maddubs_epi16(w, x);
  return first ? pairs : _mm256_add_epi16(sum, pairs);
}
PAGODA_INLINE ipart dot4_signed(ipart sum, bpart w, bpart x, bool first) {
  return dot4(sum, _mm256_abs_epi8(w), _mm256_sign_epi8(x, w), first);
}
PAGODA_INLINE ipart widen(ipart sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
constexpr bool DOTS_ARE_INT32 = false, SIGNED_IS_OFFSET = false;
#endif

#else  // portable C++

constexpr int PART = 16;
struct fpart { float x[16]; };
struct ipart { int32_t x[16]; };
struct bpart { uint8_t x[64]; };
#define PAGODA_LANES for (int i = 0; i < 16; i++)

PAGODA_INLINE fpart load(const float* p) { fpart r; std::memcpy(r.x, p, 64); return r; }
PAGODA_INLINE void store(float* p, fpart v) { std::memcpy(p, v.x, 64); }
PAGODA_INLINE fpart set(float x) { fpart r; PAGODA_LANES r.x[i] = x; return r; }
PAGODA_INLINE fpart add(fpart a, fpart b) { PAGODA_LANES a.x[i] += b.x[i]; return a; }
PAGODA_INLINE fpart sub(fpart a, fpart b) { PAGODA_LANES a.x[i] -= b.x[i]; return a; }
PAGODA_INLINE fpart mul(fpart a, fpart b) { PAGODA_LANES a.x[i] *= b.x[i]; return a; }
PAGODA_INLINE fpart div(fpart a, fpart b) { PAGODA_LANES a.x[i] /= b.x[i]; return a; }
PAGODA_INLINE fpart fma(fpart a, fpart b, fpart c) { PAGODA_LANES a.x[i] = __builtin_fmaf(a.x[i], b.x[i], c.x[i]); return a; }
// As x86's max and min: the second operand when either is NaN.
PAGODA_INLINE fpart max(fpart a, fpart b) { PAGODA_LANES a.x[i] = a.x[i] > b.x[i] ? a.x[i] : b.x[i]; return a; }
PAGODA_INLINE fpart min(fpart a, fpart b) { PAGODA_LANES a.x[i] = a.x[i] < b.x[i] ? a.x[i] : b.x[i]; return a; }
PAGODA_INLINE fpart abs(fpart a) { PAGODA_LANES a.x[i] = __builtin_fabsf(a.x[i]); return a; }
PAGODA_INLINE fpart load_half(const uint16_t* p) { fpart r; PAGODA_LANES r.x[i] = half_to_float(p[i]); return r; }
PAGODA_INLINE fpart load_bfloat(const uint16_t* p) { fpart r; PAGODA_LANES r.x[i] = bfloat_to_float(p[i]); return r; }
PAGODA_INLINE fpart load_u8(const uint8_t* p) { fpart r; PAGODA_LANES r.x[i] = p[i]; return r; }
PAGODA_INLINE fpart load_i8(const int8_t* p) { fpart r; PAGODA_LANES r.x[i] = p[i]; return r; }
PAGODA_INLINE fpart to_float(ipart a) { fpart r; PAGODA_LANES r.x[i] = static_cast<float>(a.x[i]); return r; }
PAGODA_INLINE int32_t round_to_even(float x) {
  if (!(x > -2147483648.0f && x < 2147483648.0f)) return INT32_MIN;
  return static_cast<int32_t>(__builtin_rintf(x));
}
PAGODA_INLINE ipart to_int(fpart a) { ipart r; PAGODA_LANES r.x[i] = round_to_even(a.x[i]); return r; }
PAGODA_INLINE ipart iset(int32_t x) { ipart r; PAGODA_LANES r.x[i] = x; return r; }
PAGODA_INLINE ipart isub(ipart a, ipart b) { PAGODA_LANES a.x[i] -= b.x[i]; return a; }
PAGODA_INLINE ipart iadd(ipart a, ipart b) { PAGODA_LANES a.x[i] += b.x[i]; return a; }
PAGODA_INLINE ipart load_ints(const void* p) { ipart r; std::memcpy(r.x, p, 64); return r; }
PAGODA_INLINE ipart iand(ipart a, int32_t mask) { PAGODA_LANES a.x[i] &= mask; return a; }
PAGODA_INLINE ipart shift_down(ipart a, int bits) { PAGODA_LANES a.x[i] = static_cast<int32_t>(static_cast<uint32_t>(a.x[i]) >> bits); return a; }
PAGODA_INLINE ipart shift_up(ipart a, int bits) { PAGODA_LANES a.x[i] = static_cast<int32_t>(static_cast<uint32_t>(a.x[i]) << bits); return a; }
PAGODA_INLINE ipart sign_of_top_byte(ipart a) { PAGODA_LANES a.x[i] >>= 24; return a; }
PAGODA_INLINE void store_i16(int16_t* p, ipart v) { PAGODA_LANES p[i] = static_cast<int16_t>(v.x[i]); }
PAGODA_INLINE ipart dot2(ipart sum, ipart a, ipart b) {
  PAGODA_LANES {
    int16_t x[2], y[2];
    std::memcpy(x, &a.x[i], 4);
    std::memcpy(y, &b.x[i], 4);
    sum.x[i] += x[0] * y[0] + x[1] * y[1];
  }
  return sum;
}
PAGODA_INLINE fpart exp2_int(ipart n) {
  fpart r;
  PAGODA_LANES { const uint32_t bits = static_cast<uint32_t>(n.x[i] + 127) << 23; std::memcpy(&r.x[i], &bits, 4); }
  return r;
}
PAGODA_INLINE fpart scale_by_rounded(fpart x, fpart rounded) {
  PAGODA_LANES {
    uint32_t bits, n;
    std::memcpy(&bits, &x.x[i], 4);
    std::memcpy(&n, &rounded.x[i], 4);
    bits += n << 23;
    std::memcpy(&x.x[i], &bits, 4);
  }
  return x;
}
PAGODA_INLINE fpart zero_below(fpart x, fpart limit, fpart value) {
  PAGODA_LANES value.x[i] = x.x[i] >= limit.x[i] ? value.x[i] : 0.0f;
  return value;
}
PAGODA_INLINE uint32_t lanes_above(fpart x, float limit) {
  uint32_t lanes = 0;
  PAGODA_LANES lanes |= static_cast<uint32_t>(x.x[i] > limit) << i;
  return lanes;
}
PAGODA_INLINE fpart keep_range(fpart x, int first_index, int low, int high, float fill) {
  PAGODA_LANES if (first_index + i < low || first_index + i >= high) x.x[i] = fill;
  return x;
}
PAGODA_INLINE bpart load_bytes(const uint8_t* p) { bpart r; std::memcpy(r.x, p, 64); return r; }
PAGODA_INLINE bpart low_nibbles(bpart b) { for (auto& x : b.x) x &= 15; return b; }
template <int S>
PAGODA_INLINE bpart shift_right(bpart b) { for (auto& x : b.x) x = static_cast<uint8_t>(x >> S); return b; }
template <int S>
PAGODA_INLINE bpart shift_left(bpart b) { for (auto& x : b.x) x = static_cast<uint8_t>(x << S); return b; }
PAGODA_INLINE bpart or_masked(bpart b, bpart bits, int8_t mask) {
  for (int i = 0; i < 64; i++) b.x[i] = static_cast<uint8_t>(b.x[i] | (bits.x[i] & static_cast<uint8_t>(mask)));
  return b;
}
PAGODA_INLINE bpart broadcast4(const int8_t* x) {
  bpart r;
  for (int i = 0; i < 64; i++) r.x[i] = static_cast<uint8_t>(x[i % 4]);
  return r;
}
template <int MAX_WEIGHT>
constexpr int SUMS_IN_16_BITS = 8;
PAGODA_INLINE ipart dot4(ipart sum, bpart w, bpart x, bool first) {
  if (first) sum = iset(0);
  PAGODA_LANES for (int k = 4 * i; k < 4 * i + 4; k++) sum.x[i] += static_cast<int32_t>(w.x[k]) * static_cast<int8_t>(x.x[k]);
  return sum;
}
PAGODA_INLINE ipart dot4_signed(ipart sum, bpart w, bpart x, bool first) {
  if (first) sum = iset(0);
  PAGODA_LANES for (int k = 4 * i; k < 4 * i + 4; k++) sum.x[i] += static_cast<int32_t>(static_cast<int8_t>(w.x[k])) * static_cast<int8_t>(x.x[k]);
  return sum;
}
PAGODA_INLINE ipart widen(ipart sum) { return sum; }
constexpr bool DOTS_ARE_INT32 = true, SIGNED_IS_OFFSET = false;
#undef PAGODA_LANES

#endif

constexpr int NUM_PARTS = 16 / PART;

// exp(x): 2^n * p(f) with n = round(x log2 e) and a degree-6 polynomial on |f| <= ln2 / 2 (Cody & Waite 1980).
// Relative error under 2e-7; exactly 0 for x below -87, so a masked score of -inf has no weight.
PAGODA_INLINE fpart exp(fpart x) {
  const fpart low = set(-87.0f);
  const fpart clamped = min(max(x, low), set(88.0f));
  const fpart n = to_float(to_int(mul(clamped, set(1.44269504f))));
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

#define PAGODA_PARTS _Pragma("GCC unroll 2") for (int i = 0; i < NUM_PARTS; i++)
PAGODA_INLINE f32x16 load16(const float* p) { f32x16 r; PAGODA_PARTS r.part[i] = load(p + PART * i); return r; }
PAGODA_INLINE void store(float* p, f32x16 v) { PAGODA_PARTS store(p + PART * i, v.part[i]); }
PAGODA_INLINE f32x16 set16(float x) { f32x16 r; PAGODA_PARTS r.part[i] = set(x); return r; }
PAGODA_INLINE f32x16 load_half16(const uint16_t* p) { f32x16 r; PAGODA_PARTS r.part[i] = load_half(p + PART * i); return r; }
PAGODA_INLINE f32x16 load_bfloat16(const uint16_t* p) { f32x16 r; PAGODA_PARTS r.part[i] = load_bfloat(p + PART * i); return r; }
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

// The same two int16 in every lane.
PAGODA_INLINE ipart pair(const int16_t* p) {
  int32_t both;
  std::memcpy(&both, p, 4);
  return iset(both);
}

// Lane sums by halving: lane i takes lane i + 8, then + 4, + 2, + 1. Maxima in the same order.
#if defined(__AVX2__)
#if defined(PAGODA_ISA_AVX512)
PAGODA_INLINE __m256 upper_half(__m512 v) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)); }
#endif
PAGODA_INLINE __m256 half_sum(f32x16 v) {
#if defined(PAGODA_ISA_AVX512)
  return _mm256_add_ps(_mm512_castps512_ps256(v.part[0]), upper_half(v.part[0]));
#else
  return _mm256_add_ps(v.part[0], v.part[1]);
#endif
}
PAGODA_INLINE __m256 half_max(f32x16 v) {
#if defined(PAGODA_ISA_AVX512)
  return _mm256_max_ps(_mm512_castps512_ps256(v.part[0]), upper_half(v.part[0]));
#else
  return _mm256_max_ps(v.part[0], v.part[1]);
#endif
}
PAGODA_INLINE float reduce_add(f32x16 v) {
  const __m256 eight = half_sum(v);
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
PAGODA_INLINE float reduce_max(f32x16 v) {
  const __m256 eight = half_max(v);
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}
// 32 integers of a signed byte each as bytes, and the sums of the first and of the second 16.
PAGODA_INLINE void store_group(int8_t* q, i32x16 low, i32x16 high, int32_t* sums) {
#if defined(PAGODA_ISA_AVX512)
  const __m256i bytes = _mm256_set_m128i(_mm512_cvtepi32_epi8(high.part[0]), _mm512_cvtepi32_epi8(low.part[0]));
#else
  const __m256i words_low = _mm256_packs_epi32(low.part[0], low.part[1]), words_high = _mm256_packs_epi32(high.part[0], high.part[1]);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words_low, words_high), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
#endif
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), bytes);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  const __m256i eights = _mm256_add_epi32(fours, _mm256_shuffle_epi32(fours, 0x4e));
  const __m256i all = _mm256_add_epi32(eights, _mm256_shuffle_epi32(eights, 0xb1));
  sums[0] = _mm_cvtsi128_si32(_mm256_castsi256_si128(all));
  sums[1] = _mm_cvtsi128_si32(_mm256_extracti128_si256(all, 1));
}
#else
PAGODA_INLINE float reduce_add(f32x16 v) {
  float x[16];
  store(x, v);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; i++) x[i] = x[i] + x[i + half];
  return x[0];
}
PAGODA_INLINE float reduce_max(f32x16 v) {
  float x[16];
  store(x, v);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; i++) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
  return x[0];
}
PAGODA_INLINE void store_group(int8_t* q, i32x16 low, i32x16 high, int32_t* sums) {
  sums[0] = sums[1] = 0;
  for (int i = 0; i < 16; i++) {
    q[i] = static_cast<int8_t>(low.part[0].x[i]);
    q[16 + i] = static_cast<int8_t>(high.part[0].x[i]);
    sums[0] += q[i];
    sums[1] += q[16 + i];
  }
}
#endif

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
