// y = x W^T on packed panels. Weights are the unsigned operand of a byte dot product, activations the signed
// one. The integer sum of a group is exact and the float sums run over groups in order, for every tile shape,
// so a row's result does not depend on how many rows are computed with it, nor on the instruction set.
//
// A tile is M rows of x by the 16 rows of a panel. Within a group of 32 inputs the loop runs over the eight
// weight vectors: each is unpacked once, each four bytes of x are broadcast once, and M x NUM_PARTS sums stay
// in registers.
#pragma once
#include <utility>

#include "../common/kernel_table.h"
#include "../common/simd.h"

namespace pagoda {
namespace PAGODA_ISA {

#if defined(PAGODA_ISA_AVX512)
constexpr int MAX_TILE_ROWS = 8;
#elif defined(__AVX2__)
constexpr int MAX_TILE_ROWS = 4;
#else
constexpr int MAX_TILE_ROWS = 2;
#endif

constexpr size_t PREFETCH_BYTES = 2048;  // how far a single row runs ahead in the weights, which it reads once

// Vector J of a group, unpacked. Both nibbles of a byte are used one after the other, so it is loaded once.
template <int J>
PAGODA_INLINE bpart nibbles(const uint8_t* group, int part) {
  const bpart packed = load_bytes(group + 64 * (J % 4) + 4 * PART * part);
  if constexpr (J < 4) return low_nibbles(packed);
  else return low_nibbles(shift_right<4>(packed));
}
template <int J>
PAGODA_INLINE bpart with_fifth_bit(bpart v, const uint8_t* plane, int part) {
  const bpart bits = load_bytes(plane + 4 * PART * part);
  if constexpr (J < 4) return or_masked(v, shift_left<4 - J>(bits), 16);
  else return or_masked(v, shift_right<J - 4>(bits), 16);
}
template <int J>
PAGODA_INLINE bpart with_two_bits(bpart v, const uint8_t* planes, int part) {
  const bpart bits = load_bytes(planes + 64 * (J / 4) + 4 * PART * part);
  if constexpr (J % 4 < 2) return or_masked(v, shift_left<4 - 2 * (J % 4)>(bits), 48);
  else return or_masked(v, shift_right<2 * (J % 4) - 4>(bits), 48);
}

using PairedOrder = std::integer_sequence<int, 0, 4, 1, 5, 2, 6, 3, 7>;
using FirstHalf = std::integer_sequence<int, 0, 1, 2, 3>;
using SecondHalf = std::integer_sequence<int, 4, 5, 6, 7>;

template <int M>
struct Dots {
  ipart sum[NUM_PARTS][M];
};

// sum over the vectors of Order of W::vector<J> . x, for M rows of x `stride` bytes apart.
template <class W, int M, int... J>
PAGODA_INLINE Dots<M> dot_vectors(const uint8_t* group, const int8_t* x, size_t stride, std::integer_sequence<int, J...>) {
  Dots<M> total;
  ipart run[NUM_PARTS][M];
  int n = 0;  // a constant once unrolled
  const auto add_vector = [&](auto vector) __attribute__((always_inline)) {
    constexpr int V = decltype(vector)::value;
    constexpr int RUN = SUMS_IN_16_BITS<W::MAX_WEIGHT>;
    bpart w[NUM_PARTS];
#pragma GCC unroll 2
    for (int part = 0; part < NUM_PARTS; part++) w[part] = W::template vector<V>(group, part);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      const bpart four = broadcast4(x + static_cast<size_t>(m) * stride + 4 * V);
#pragma GCC unroll 2
      for (int part = 0; part < NUM_PARTS; part++) {
        run[part][m] = W::SIGNED ? dot4_signed(run[part][m], w[part], four, n % RUN == 0) : dot4(run[part][m], w[part], four, n % RUN == 0);
        if (n % RUN == RUN - 1 || n == static_cast<int>(sizeof...(J)) - 1)
          total.sum[part][m] = n < RUN ? widen(run[part][m]) : iadd(total.sum[part][m], widen(run[part][m]));
      }
    }
    n++;
  };
  (add_vector(std::integral_constant<int, J>{}), ...);
  return total;
}

// One plane of M rows of x.
struct RowsOfX {
  const QuantPlane& plane;
  size_t cols;
  PAGODA_INLINE size_t stride() const { return cols; }
  PAGODA_INLINE const int8_t* q(int group) const { return plane.q + GROUP * group; }
  PAGODA_INLINE size_t at(int m, int group) const { return static_cast<size_t>(m) * (cols / GROUP) + static_cast<size_t>(group); }
  PAGODA_INLINE fpart scale(int m, int group) const { return set(plane.scale[at(m, group)]); }
  PAGODA_INLINE fpart scaled_sum(int m, int group) const { return set(plane.scaled_sum[at(m, group)]); }
  PAGODA_INLINE int32_t sum(int m, int group, int half) const { return plane.sums[2 * at(m, group) + static_cast<size_t>(half)]; }
};

template <int M>
struct Sums {
  fpart sum[NUM_PARTS][M];
};

// Out of line and by value, so that the sums of the common case stay in registers.
template <class F, int M>
__attribute__((noinline)) Sums<M> with_second_plane(const uint8_t* block, int g, const QuantRows& x, int group, Sums<M> sums) {
  F::template add_group<M>(block, g, RowsOfX{x.planes[1], static_cast<size_t>(x.cols)}, group, sums);
  return sums;
}

// Adds group g of a block: the first plane of x, and the second when one of M rows has an outlier there. A row
// without one gains exactly 0 from it, so its sum does not depend on its neighbours.
template <class F, int M>
PAGODA_INLINE void add_planes(const uint8_t* block, int g, const QuantRows& x, int group, Sums<M>& sums) {
  F::template add_group<M>(block, g, RowsOfX{x.planes[0], static_cast<size_t>(x.cols)}, group, sums);
  uint64_t outliers = 0;
  std::memcpy(&outliers, x.outlier + x.outlier_stride * static_cast<size_t>(group), M);
  if (__builtin_expect(outliers != 0, 0)) sums = with_second_plane<F, M>(block, g, x, group, sums);
}

// sums += scale_x * (scale_w * dot) + minimum_w * scaled_sum_x
template <int M, class Scale, class Minimum>
PAGODA_INLINE void add_with_minimum(Sums<M>& sums, const Dots<M>& dots, Scale scale_of, Minimum minimum_of, const RowsOfX& x, int group) {
#pragma GCC unroll 2
  for (int part = 0; part < NUM_PARTS; part++) {
    const fpart scale = scale_of(part), minimum = minimum_of(part);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      fpart& s = sums.sum[part][m];
      s = fma(mul(to_float(dots.sum[part][m]), scale), x.scale(m, group), s);
      s = fma(minimum, x.scaled_sum(m, group), s);
    }
  }
}

template <Format F>
struct Legacy {  // Q4 and Q5: a scale and a minimum in f16 for each group
  static constexpr Format format = F;
  static constexpr bool FIVE = F == Format::Q5, SIGNED = false;
  static constexpr int MAX_WEIGHT = FIVE ? 31 : 15;
  template <int J>
  static PAGODA_INLINE bpart vector(const uint8_t* group, int part) {
    if constexpr (FIVE) return with_fifth_bit<J>(nibbles<J>(group, part), group + 256, part);
    else return nibbles<J>(group, part);
  }
  template <int M>
  static PAGODA_INLINE void add_group(const uint8_t* group, int, const RowsOfX& x, int index, Sums<M>& sums) {
    const auto* halves = reinterpret_cast<const uint16_t*>(group + (FIVE ? 320 : 256));
    const Dots<M> dots = dot_vectors<Legacy, M>(group, x.q(index), x.stride(), PairedOrder{});
    add_with_minimum<M>(
        sums, dots, [&](int part) { return load_half(halves + PART * part); }, [&](int part) { return load_half(halves + 16 + PART * part); }, x,
        index);
  }
};

struct Q8 {
  static constexpr Format format = Format::Q8;
  static constexpr bool SIGNED = true;
  static constexpr int MAX_WEIGHT = 128;
  template <int J>
  static PAGODA_INLINE bpart vector(const uint8_t* group, int part) { return load_bytes(group + 64 * J + 4 * PART * part); }
  template <int M>
  static PAGODA_INLINE void add_group(const uint8_t* group, int, const RowsOfX& x, int index, Sums<M>& sums) {
    const auto* halves = reinterpret_cast<const uint16_t*>(group + 512);
    const Dots<M> dots = dot_vectors<Q8, M>(group, x.q(index), x.stride(), PairedOrder{});
#pragma GCC unroll 2
    for (int part = 0; part < NUM_PARTS; part++) {
      const fpart scale = load_half(halves + PART * part);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        const ipart dot = without_offset(dots.sum[part][m], x.sum(m, index, 0) + x.sum(m, index, 1));
        sums.sum[part][m] = fma(mul(to_float(dot), scale), x.scale(m, index), sums.sum[part][m]);
      }
    }
  }
};

template <Format F>
struct SuperWithMinimum {  // Q4K and Q5K: six-bit scales and minima times two f16 of the super-block
  static constexpr Format format = F;
  static constexpr bool FIVE = F == Format::Q5K, SIGNED = false;
  static constexpr int MAX_WEIGHT = FIVE ? 31 : 15, BITS_BYTES = FIVE ? 64 : 0;
  template <int J>
  static PAGODA_INLINE bpart vector(const uint8_t* group, int part) {
    if constexpr (FIVE) return with_fifth_bit<J>(nibbles<J>(group, part), group + 256, part);
    else return nibbles<J>(group, part);
  }
  template <int M>
  static PAGODA_INLINE void add_group(const uint8_t* super, int g, const RowsOfX& x, int index, Sums<M>& sums) {
    const auto* halves = reinterpret_cast<const uint16_t*>(super);
    const uint8_t* group = super + 64 + (288 + BITS_BYTES) * g;
    const uint8_t* scales = group + 256 + BITS_BYTES;
    const Dots<M> dots = dot_vectors<SuperWithMinimum, M>(group, x.q(index), x.stride(), PairedOrder{});
    add_with_minimum<M>(
        sums, dots, [&](int part) { return mul(load_half(halves + PART * part), load_u8(scales + PART * part)); },
        [&](int part) { return sub(set(0.0f), mul(load_half(halves + 16 + PART * part), load_u8(scales + 16 + PART * part))); }, x, index);
  }
};

// Two signed scales a group; the offset of 32 is taken off in integers, so a half-group stays exact.
struct Q6K {
  static constexpr Format format = Format::Q6K;
  static constexpr bool SIGNED = false;
  static constexpr int MAX_WEIGHT = 63;
  template <int J>
  static PAGODA_INLINE bpart vector(const uint8_t* group, int part) {
    return with_two_bits<J>(nibbles<J>(group, part), group + 256, part);
  }
  template <int M>
  static PAGODA_INLINE void add_group(const uint8_t* super, int g, const RowsOfX& x, int i, Sums<M>& sums) {
    const auto* halves = reinterpret_cast<const uint16_t*>(super);
    const uint8_t* group = super + 32 + 416 * g;
    const auto* scales = reinterpret_cast<const int8_t*>(group + 384);
    const Dots<M> first = dot_vectors<Q6K, M>(group, x.q(i), x.stride(), FirstHalf{});
    fpart scaled[NUM_PARTS][M];
#pragma GCC unroll 2
    for (int part = 0; part < NUM_PARTS; part++) {
      const fpart scale = mul(load_half(halves + PART * part), load_i8(scales + PART * part));
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) scaled[part][m] = mul(to_float(isub(first.sum[part][m], iset(32 * x.sum(m, i, 0)))), scale);
    }
    const Dots<M> second = dot_vectors<Q6K, M>(group, x.q(i), x.stride(), SecondHalf{});
#pragma GCC unroll 2
    for (int part = 0; part < NUM_PARTS; part++) {
      const fpart scale = mul(load_half(halves + PART * part), load_i8(scales + 16 + PART * part));
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        const fpart dot = to_float(isub(second.sum[part][m], iset(32 * x.sum(m, i, 1))));
        sums.sum[part][m] = fma(fma(dot, scale, scaled[part][m]), x.scale(m, i), sums.sum[part][m]);
      }
    }
  }
};

// Results go to out[m][16 panel + lane] = sum + bias + residual.
PAGODA_INLINE void store_result(const LinearTarget& o, int row, int column, fpart sum) {
  if (o.bias) sum = add(sum, load(o.bias + column));
  if (o.residual) sum = add(sum, load(o.residual + static_cast<size_t>(row) * o.residual_stride + column));
  store(o.out + static_cast<size_t>(row) * o.stride + column, sum);
}

template <class F, int M>
inline void quant_tile(const uint8_t* panel, int num_blocks, const QuantRows& rows, int row, int column, const LinearTarget& o) {
  Sums<M> sums;
  for (int part = 0; part < NUM_PARTS; part++)
    for (int m = 0; m < M; m++) sums.sum[part][m] = set(0.0f);
  constexpr int GROUPS = block_inputs(F::format) / GROUP;
  for (int b = 0; b < num_blocks; b++)
    for (int g = 0; g < GROUPS; g++) {
      if (M <= 2 && GROUPS == 1) prefetch(panel + block_bytes(F::format) * static_cast<size_t>(b) + PREFETCH_BYTES, block_bytes(F::format));
      add_planes<F, M>(panel + block_bytes(F::format) * static_cast<size_t>(b), g, rows, GROUPS * b + g, sums);
    }
  for (int part = 0; part < NUM_PARTS; part++)
    for (int m = 0; m < M; m++) store_result(o, row + m, column + PART * part, sums.sum[part][m]);
}

template <class F>
inline void quant_panels(const PackedWeight& w, const QuantRows& all, int row0, int row1, int panel0, int panel1, const LinearTarget& o) {
  const int num_blocks = w.cols / block_inputs(w.format);
  for (int p = panel0; p < panel1; p++) {
    const uint8_t* panel = w.panel(p);
    const int column = PANEL * p;
    int row = row0;
    for (; row + MAX_TILE_ROWS <= row1; row += MAX_TILE_ROWS)
      quant_tile<F, MAX_TILE_ROWS>(panel, num_blocks, all.from_row(row), row, column, o);
    if constexpr (MAX_TILE_ROWS > 4)
      if (row + 4 <= row1) quant_tile<F, 4>(panel, num_blocks, all.from_row(row), row, column, o), row += 4;
    const QuantRows rest = all.from_row(row);
    const int num_rest = row1 - row;
    if constexpr (MAX_TILE_ROWS > 2) {
      if (num_rest == 3) quant_tile<F, 3>(panel, num_blocks, rest, row, column, o);
      if (num_rest == 2) quant_tile<F, 2>(panel, num_blocks, rest, row, column, o);
    }
    if (num_rest == 1) quant_tile<F, 1>(panel, num_blocks, rest, row, column, o);
  }
}

// Weights in floats: one FMA chain over the inputs.
template <Format F, int M>
inline void float_tile(const uint8_t* panel, int cols, const float* x, size_t stride, int row, int column, const LinearTarget& o) {
  f32x16 acc[M];
  for (int m = 0; m < M; m++) acc[m] = set16(0.0f);
  for (int c = 0; c < cols; c++) {
    const uint8_t* values = panel + block_bytes(F) * static_cast<size_t>(c);
    f32x16 w;
    if constexpr (F == Format::F32) w = load16(reinterpret_cast<const float*>(values));
    else if constexpr (F == Format::F16) w = load_half16(reinterpret_cast<const uint16_t*>(values));
    else w = load_bfloat16(reinterpret_cast<const uint16_t*>(values));
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) acc[m] = fma(set16(x[static_cast<size_t>(m) * stride + static_cast<size_t>(c)]), w, acc[m]);
  }
  for (int m = 0; m < M; m++)
    for (int part = 0; part < NUM_PARTS; part++) store_result(o, row + m, column + PART * part, acc[m].part[part]);
}

template <Format F>
inline void float_panels(const PackedWeight& w, const float* x, size_t stride, int row0, int row1, int panel0, int panel1, const LinearTarget& o) {
  for (int p = panel0; p < panel1; p++) {
    int row = row0;
    for (; row + 4 <= row1; row += 4)
      float_tile<F, 4>(w.panel(p), w.cols, x + static_cast<size_t>(row) * stride, stride, row, PANEL * p, o);
    for (; row < row1; row++)
      float_tile<F, 1>(w.panel(p), w.cols, x + static_cast<size_t>(row) * stride, stride, row, PANEL * p, o);
  }
}

// Rows [row0, row1) times panels [panel0, panel1). `quant` is read for quantised formats, `x` for floats.
inline void linear(const PackedWeight& w, const QuantRows& quant, const float* x, size_t stride, int row0, int row1, int panel0,
                   int panel1, const LinearTarget& o) {
  switch (w.format) {
    case Format::F32: return float_panels<Format::F32>(w, x, stride, row0, row1, panel0, panel1, o);
    case Format::F16: return float_panels<Format::F16>(w, x, stride, row0, row1, panel0, panel1, o);
    case Format::BF16: return float_panels<Format::BF16>(w, x, stride, row0, row1, panel0, panel1, o);
    case Format::Q4: return quant_panels<Legacy<Format::Q4>>(w, quant, row0, row1, panel0, panel1, o);
    case Format::Q5: return quant_panels<Legacy<Format::Q5>>(w, quant, row0, row1, panel0, panel1, o);
    case Format::Q8: return quant_panels<Q8>(w, quant, row0, row1, panel0, panel1, o);
    case Format::Q4K: return quant_panels<SuperWithMinimum<Format::Q4K>>(w, quant, row0, row1, panel0, panel1, o);
    case Format::Q5K: return quant_panels<SuperWithMinimum<Format::Q5K>>(w, quant, row0, row1, panel0, panel1, o);
    case Format::Q6K: return quant_panels<Q6K>(w, quant, row0, row1, panel0, panel1, o);
  }
}

}  // namespace PAGODA_ISA
}  // namespace pagoda
