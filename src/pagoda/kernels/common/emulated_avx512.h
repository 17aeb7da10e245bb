// What SIMDe lacks of AVX-512, from AVX2 halves: lets a machine without AVX-512 test that build of the kernels.
#pragma once
#include <cstring>

namespace pagoda {
namespace emulated {

template <class Whole, class Half>
Whole from_halves(Half low, Half high) {
  Whole whole;
  std::memcpy(&whole, &low, sizeof low);
  std::memcpy(reinterpret_cast<char*>(&whole) + sizeof low, &high, sizeof high);
  return whole;
}
template <class Half, class Whole>
Half half_of(const Whole& whole, int i) {
  Half half;
  std::memcpy(&half, reinterpret_cast<const char*>(&whole) + sizeof half * static_cast<size_t>(i), sizeof half);
  return half;
}
inline __m512 cvtph_ps(__m256i x) {
  return from_halves<__m512>(_mm256_cvtph_ps(half_of<__m128i>(x, 0)), _mm256_cvtph_ps(half_of<__m128i>(x, 1)));
}
inline __m256i cvtps_ph(__m512 x) {
  return from_halves<__m256i>(_mm256_cvtps_ph(half_of<__m256>(x, 0), 0), _mm256_cvtps_ph(half_of<__m256>(x, 1), 0));
}
inline __m512i cvtepu16_epi32(__m256i x) {
  return from_halves<__m512i>(_mm256_cvtepu16_epi32(half_of<__m128i>(x, 0)), _mm256_cvtepu16_epi32(half_of<__m128i>(x, 1)));
}
inline __m512i cvtepu8_epi32(__m128i x) { return from_halves<__m512i>(_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))); }
inline __m512i cvtepi8_epi32(__m128i x) { return from_halves<__m512i>(_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))); }
inline __m512i cvtps_epi32(__m512 x) {
  return from_halves<__m512i>(_mm256_cvtps_epi32(half_of<__m256>(x, 0)), _mm256_cvtps_epi32(half_of<__m256>(x, 1)));
}
inline __m512 cvtepi32_ps(__m512i x) {
  return from_halves<__m512>(_mm256_cvtepi32_ps(half_of<__m256i>(x, 0)), _mm256_cvtepi32_ps(half_of<__m256i>(x, 1)));
}
inline __m128i cvtepi32_epi8(__m512i x) {
  alignas(64) int lanes[16];
  alignas(16) signed char bytes[16];
  std::memcpy(lanes, &x, sizeof lanes);
  for (int i = 0; i < 16; i++) bytes[i] = static_cast<signed char>(lanes[i]);
  __m128i result;
  std::memcpy(&result, bytes, sizeof bytes);
  return result;
}

}  // namespace emulated
}  // namespace pagoda

#define _mm512_cvtph_ps(x) pagoda::emulated::cvtph_ps(x)
#define _mm512_cvtps_ph(x, rounding) pagoda::emulated::cvtps_ph(x)
#define _mm512_cvtepu16_epi32(x) pagoda::emulated::cvtepu16_epi32(x)
#define _mm512_cvtepu8_epi32(x) pagoda::emulated::cvtepu8_epi32(x)
#define _mm512_cvtepi8_epi32(x) pagoda::emulated::cvtepi8_epi32(x)
#define _mm512_cvtps_epi32(x) pagoda::emulated::cvtps_epi32(x)
#define _mm512_cvtepi32_ps(x) pagoda::emulated::cvtepi32_ps(x)
#define _mm512_cvtepi32_epi8(x) pagoda::emulated::cvtepi32_epi8(x)
