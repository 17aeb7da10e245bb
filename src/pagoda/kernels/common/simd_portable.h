// Portable C++: 16 lanes in an array.
#pragma once

namespace pagoda {
namespace PAGODA_ISA {

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
PAGODA_INLINE fpart load_u8(const uint8_t* p) { fpart r; PAGODA_LANES r.x[i] = p[i]; return r; }
PAGODA_INLINE fpart load_i8(const int8_t* p) { fpart r; PAGODA_LANES r.x[i] = p[i]; return r; }
PAGODA_INLINE fpart to_float(ipart a) { fpart r; PAGODA_LANES r.x[i] = static_cast<float>(a.x[i]); return r; }
PAGODA_INLINE int32_t round_to_even(float x) {
  if (!(x > -2147483648.0f && x < 2147483648.0f)) return INT32_MIN;
  return static_cast<int32_t>(__builtin_rintf(x));
}
PAGODA_INLINE fpart bits_as_float(ipart a) { fpart r; std::memcpy(r.x, a.x, 64); return r; }
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
PAGODA_INLINE ipart pair(const int16_t* p) {
  int32_t both;
  std::memcpy(&both, p, 4);
  return iset(both);
}
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
PAGODA_INLINE bpart high_nibbles(bpart b) { for (auto& x : b.x) x >>= 4; return b; }
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

}  // namespace PAGODA_ISA
}  // namespace pagoda
