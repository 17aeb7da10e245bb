// Operations across the 16 lanes of f32x16 and i32x16.
#pragma once

namespace pagoda {
namespace PAGODA_ISA {

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
#elif defined(PAGODA_ISA_NEON)
PAGODA_INLINE float reduce_add(f32x16 v) {
  const fpart four = add(add(v.part[0], v.part[2]), add(v.part[1], v.part[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
PAGODA_INLINE float reduce_max(f32x16 v) {
  const fpart four = max(max(v.part[0], v.part[2]), max(v.part[1], v.part[3]));
  const fpart two = max(four, vextq_f32(four, four, 2));
  return vgetq_lane_f32(max(two, vdupq_laneq_f32(two, 1)), 0);
}
PAGODA_INLINE int8x16_t to_bytes(i32x16 v) {
  const int16x8_t low = vcombine_s16(vmovn_s32(v.part[0]), vmovn_s32(v.part[1]));
  const int16x8_t high = vcombine_s16(vmovn_s32(v.part[2]), vmovn_s32(v.part[3]));
  return vcombine_s8(vmovn_s16(low), vmovn_s16(high));
}
PAGODA_INLINE void store_group(int8_t* q, i32x16 low, i32x16 high, int32_t* sums) {
  const int8x16_t first = to_bytes(low), second = to_bytes(high);
  vst1q_s8(q, first);
  vst1q_s8(q + 16, second);
  sums[0] = vaddlvq_s8(first);
  sums[1] = vaddlvq_s8(second);
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

}  // namespace PAGODA_ISA
}  // namespace pagoda
