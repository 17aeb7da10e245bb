// NEON with the dot product extension (armv8.2-a+dotprod): 4 lanes a register.
#pragma once
#include <arm_neon.h>

namespace pagoda {
namespace PAGODA_ISA {

constexpr int PART = 4;
using fpart = float32x4_t;
using ipart = int32x4_t;
using bpart = uint8x16_t;

PAGODA_INLINE fpart load(const float* p) { return vld1q_f32(p); }
PAGODA_INLINE void store(float* p, fpart v) { vst1q_f32(p, v); }
PAGODA_INLINE fpart set(float x) { return vdupq_n_f32(x); }
PAGODA_INLINE fpart add(fpart a, fpart b) { return vaddq_f32(a, b); }
PAGODA_INLINE fpart sub(fpart a, fpart b) { return vsubq_f32(a, b); }
PAGODA_INLINE fpart mul(fpart a, fpart b) { return vmulq_f32(a, b); }
PAGODA_INLINE fpart div(fpart a, fpart b) { return vdivq_f32(a, b); }
PAGODA_INLINE fpart fma(fpart a, fpart b, fpart c) { return vfmaq_f32(c, a, b); }
// As x86's max and min: the second operand when either is NaN, or when both are zeros.
PAGODA_INLINE fpart max(fpart a, fpart b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
PAGODA_INLINE fpart min(fpart a, fpart b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
PAGODA_INLINE fpart abs(fpart a) { return vabsq_f32(a); }
PAGODA_INLINE fpart load_half(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
PAGODA_INLINE uint64_t four_bytes(const void* p) {
  uint32_t four;
  std::memcpy(&four, p, 4);
  return four;
}
PAGODA_INLINE fpart load_u8(const uint8_t* p) {
  return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four_bytes(p))))));
}
PAGODA_INLINE fpart load_i8(const int8_t* p) {
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four_bytes(p))))));
}
PAGODA_INLINE fpart to_float(ipart a) { return vcvtq_f32_s32(a); }
PAGODA_INLINE ipart iset(int32_t x) { return vdupq_n_s32(x); }
PAGODA_INLINE fpart bits_as_float(ipart a) { return vreinterpretq_f32_s32(a); }
// As on x86, NaN and what is too large become the lowest integer; NEON alone would give 0 and the highest.
PAGODA_INLINE ipart to_int(fpart a) { return vbslq_s32(vcltq_f32(a, set(2147483648.0f)), vcvtnq_s32_f32(a), iset(INT32_MIN)); }
PAGODA_INLINE ipart isub(ipart a, ipart b) { return vsubq_s32(a, b); }
PAGODA_INLINE ipart iadd(ipart a, ipart b) { return vaddq_s32(a, b); }
PAGODA_INLINE ipart load_ints(const void* p) { return vreinterpretq_s32_u8(vld1q_u8(static_cast<const uint8_t*>(p))); }
PAGODA_INLINE ipart iand(ipart a, int32_t mask) { return vandq_s32(a, iset(mask)); }
PAGODA_INLINE ipart shift_down(ipart a, int bits) {
  return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a), iset(-bits)));
}
PAGODA_INLINE ipart shift_up(ipart a, int bits) { return vshlq_s32(a, iset(bits)); }
PAGODA_INLINE ipart sign_of_top_byte(ipart a) { return vshrq_n_s32(a, 24); }
PAGODA_INLINE void store_i16(int16_t* p, ipart v) { vst1_s16(p, vmovn_s32(v)); }
PAGODA_INLINE fpart exp2_int(ipart n) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, iset(127)), 23)); }
PAGODA_INLINE fpart scale_by_rounded(fpart x, fpart rounded) {
  return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x), vshlq_n_s32(vreinterpretq_s32_f32(rounded), 23)));
}
PAGODA_INLINE fpart only_where(uint32x4_t mask, fpart x) { return vreinterpretq_f32_u32(vandq_u32(mask, vreinterpretq_u32_f32(x))); }
PAGODA_INLINE fpart zero_below(fpart x, fpart limit, fpart value) { return only_where(vcgeq_f32(x, limit), value); }
PAGODA_INLINE uint32_t lanes_above(fpart x, float limit) {
  const uint32x4_t bits = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(vcgtq_f32(x, set(limit)), bits));
}
PAGODA_INLINE fpart keep_range(fpart x, int first_index, int low, int high, float fill) {
  const ipart lanes = {0, 1, 2, 3}, index = vaddq_s32(iset(first_index), lanes);
  return vbslq_f32(vandq_u32(vcgeq_s32(index, iset(low)), vcltq_s32(index, iset(high))), x, set(fill));
}
PAGODA_INLINE bpart load_bytes(const uint8_t* p) { return vld1q_u8(p); }
PAGODA_INLINE bpart low_nibbles(bpart b) { return vandq_u8(b, vdupq_n_u8(15)); }
PAGODA_INLINE bpart high_nibbles(bpart b) { return vshrq_n_u8(b, 4); }
template <int S>
PAGODA_INLINE bpart shift_right(bpart b) {
  if constexpr (S == 0) return b;
  else return vshrq_n_u8(b, S);
}
template <int S>
PAGODA_INLINE bpart shift_left(bpart b) { return vshlq_n_u8(b, S); }
// `b` has no bit of the mask.
PAGODA_INLINE bpart or_masked(bpart b, bpart bits, int8_t mask) { return vbslq_u8(vdupq_n_u8(static_cast<uint8_t>(mask)), bits, b); }

// Products spread a lane of their second operand by themselves, so `broadcast4` and `pair` fill the first one only.
PAGODA_INLINE bpart broadcast4(const int8_t* x) { return vcombine_u8(vcreate_u8(four_bytes(x)), vcreate_u8(0)); }
PAGODA_INLINE ipart pair(const int16_t* p) {
  int32_t both;
  std::memcpy(&both, p, 4);
  return ipart{both, 0, 0, 0};
}
PAGODA_INLINE ipart dot2(ipart sum, ipart a, ipart b) {
  const int16x4_t both = vget_low_s16(vreinterpretq_s16_s32(b));
  sum = vmlal_lane_s16(sum, vmovn_s32(a), both, 0);
  return vmlal_lane_s16(sum, vshrn_n_s32(a, 16), both, 1);
}
template <int MAX_WEIGHT>
constexpr int SUMS_IN_16_BITS = 8;
PAGODA_INLINE ipart dot4_signed(ipart sum, bpart w, bpart x, bool first) {
  return vdotq_lane_s32(first ? iset(0) : sum, vreinterpretq_s8_u8(w), vget_low_s8(vreinterpretq_s8_u8(x)), 0);
}
// Signed as well: only `dot4_signed` meets weights of eight bits.
PAGODA_INLINE ipart dot4(ipart sum, bpart w, bpart x, bool first) { return dot4_signed(sum, w, x, first); }
PAGODA_INLINE ipart widen(ipart sum) { return sum; }
constexpr bool DOTS_ARE_INT32 = true, SIGNED_IS_OFFSET = false;

}  // namespace PAGODA_ISA
}  // namespace pagoda
