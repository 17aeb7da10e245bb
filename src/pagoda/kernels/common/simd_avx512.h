// AVX-512 with VNNI: 16 lanes a register.
#pragma once
#ifdef PAGODA_EMULATE_AVX512
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>
#include "emulated_avx512.h"
#else
#include <immintrin.h>
#endif

namespace pagoda {
namespace PAGODA_ISA {

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
PAGODA_INLINE fpart load_u8(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
PAGODA_INLINE fpart load_i8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
PAGODA_INLINE fpart to_float(ipart a) { return _mm512_cvtepi32_ps(a); }
PAGODA_INLINE fpart bits_as_float(ipart a) { return _mm512_castsi512_ps(a); }
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
// The same two int16 in every lane.
PAGODA_INLINE ipart pair(const int16_t* p) {
  int32_t both;
  std::memcpy(&both, p, 4);
  return iset(both);
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
PAGODA_INLINE bpart high_nibbles(bpart b) { return low_nibbles(shift_right<4>(b)); }
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

}  // namespace PAGODA_ISA
}  // namespace pagoda
