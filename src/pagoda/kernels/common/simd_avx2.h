// AVX2 with FMA and F16C: 8 lanes a register. Byte dot products with VNNI or without.
#pragma once
#include <immintrin.h>

namespace pagoda {
namespace PAGODA_ISA {

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
PAGODA_INLINE fpart load_u8(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
PAGODA_INLINE fpart load_i8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
PAGODA_INLINE fpart to_float(ipart a) { return _mm256_cvtepi32_ps(a); }
PAGODA_INLINE fpart bits_as_float(ipart a) { return _mm256_castsi256_ps(a); }
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
PAGODA_INLINE ipart pair(const int16_t* p) {
  int32_t both;
  std::memcpy(&both, p, 4);
  return iset(both);
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
PAGODA_INLINE bpart high_nibbles(bpart b) { return low_nibbles(shift_right<4>(b)); }
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

}  // namespace PAGODA_ISA
}  // namespace pagoda
