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
#include "floats.h"

namespace pagoda {
namespace PAGODA_ISA {

#if defined(PAGODA_ISA_AVX512)
constexpr int MAX_TILE_ROWS = 8;
#elif defined(__AVX2__) || defined(PAGODA_ISA_NEON)
constexpr int MAX_TILE_ROWS = 4;
#else
constexpr int MAX_TILE_ROWS = 2;
#endif

constexpr size_t PREFETCH_BYTES = 8192;  // how far one or two rows run ahead in the weights, which they read once

// Vector J of a group, unpacked. Both nibbles of a byte are used one after the other, so it is loaded once.
template <int J>
PAGODA_INLINE bpart nibbles(const uint8_t* group, int part) {
  const bpart packed = load_bytes(group + 64 * (J % 4) + 4 * PART * part);
  if constexpr (J < 4) return low_nibbles(packed);
  else return high_nibbles(packed);
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

struct FromZero {
  PAGODA_INLINE ipart operator()(int) const { return iset(0); }
};

// start(m) + sum over the vectors of Order of W::vector<J> . x, for M rows of x `stride` bytes apart.
template <class W, int M, class Start, int... J>
PAGODA_INLINE Dots<M> dot_vectors(const uint8_t* group, const int8_t* x, size_t stride, Start start, std::integer_sequence<int, J...>) {
  Dots<M> total;
  ipart run[NUM_PARTS][M];
  int n = 0;  // a constant once unrolled
  const auto add_vector = [&](auto vector) __attribute__((always_inline)) {
    constexpr int V = decltype(vector)::value;
    constexpr int RUN = SUMS_IN_16_BITS<W::MAX_WEIGHT>;
    bpart w[NUM_PARTS];
#pragma GCC unroll 4
    for (int part = 0; part < NUM_PARTS; part++) w[part] = W::template vector<V>(group, part);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      const bpart four = broadcast4(x + static_cast<size_t>(m) * stride + 4 * V);
#pragma GCC unroll 4
      for (int part = 0; part < NUM_PARTS; part++) {
        ipart& r = run[part][m];
        const bool first = !DOTS_ARE_INT32 && n % RUN == 0;
        if (DOTS_ARE_INT32 && n == 0) r = start(m);
        r = W::SIGNED ? dot4_signed(r, w[part], four, first) : dot4(r, w[part], four, first);
        if (n % RUN == RUN - 1 || n == static_cast<int>(sizeof...(J)) - 1) {
          const ipart sum = widen(r);
          total.sum[part][m] = n >= RUN ? iadd(total.sum[part][m], sum) : DOTS_ARE_INT32 ? sum : iadd(start(m), sum);
        }
      }
    }
    n++;
  };
  (add_vector(std::integral_constant<int, J>{}), ...);
  return total;
}

// M rows of x.
struct RowsOfX {
  const QuantRows& rows;
  PAGODA_INLINE size_t stride() const { return static_cast<size_t>(rows.cols); }
  PAGODA_INLINE const int8_t* q(int group) const { return rows.q + GROUP * group; }
  PAGODA_INLINE size_t at(int m, int group) const { return static_cast<size_t>(m) * (stride() / GROUP) + static_cast<size_t>(group); }
  PAGODA_INLINE fpart scale(int m, int group) const { return set(rows.scale[at(m, group)]); }
  PAGODA_INLINE fpart scaled_sum(int m, int group) const { return set(rows.scaled_sum[at(m, group)]); }
  PAGODA_INLINE ipart offset(int m, int group) const { return iset(rows.offset[at(m, group)]); }
  PAGODA_INLINE ipart half_offset(int m, int group, int half) const { return iset(rows.half_offset[2 * at(m, group) + static_cast<size_t>(half)]); }
};

template <int M>
struct Sums {
  fpart sum[NUM_PARTS][M];
};

// sums += scale_x * (scale_w * dot) + minimum_w * scaled_sum_x
template <int M, class Scale, class Minimum>
PAGODA_INLINE void add_with_minimum(Sums<M>& sums, const Dots<M>& dots, Scale scale_of, Minimum minimum_of, const RowsOfX& x, int group) {
#pragma GCC unroll 4
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

// Quant k of a group for each output row of a part: nibble, fifth bit, two bits, as integers.
PAGODA_INLINE ipart column_nibble(const uint8_t* group, int k, int part) {
  const int vector = k / 4;
  return iand(shift_down(load_ints(group + 64 * (vector % 4) + 4 * PART * part), 8 * (k % 4) + 4 * (vector / 4)), 15);
}
PAGODA_INLINE ipart column_fifth_bit(const uint8_t* plane, int k, int part) {
  return shift_up(iand(shift_down(load_ints(plane + 4 * PART * part), 8 * (k % 4) + k / 4), 1), 4);
}
PAGODA_INLINE ipart column_two_bits(const uint8_t* planes, int k, int part) {
  const int vector = k / 4;
  return shift_up(iand(shift_down(load_ints(planes + 64 * (vector / 4) + 4 * PART * part), 8 * (k % 4) + 2 * (vector % 4)), 3), 4);
}

// Each format has `vector`, eight of which make a group; `add_group`, which adds M rows' products with a group;
// and `column`, the weights of input k of group g in floats.
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
    const Dots<M> dots = dot_vectors<Legacy, M>(group, x.q(index), x.stride(), FromZero{}, PairedOrder{});
    add_with_minimum<M>(
        sums, dots, [&](int part) { return load_half(halves + PART * part); }, [&](int part) { return load_half(halves + 16 + PART * part); }, x,
        index);
  }
  static PAGODA_INLINE fpart column(const uint8_t* group, int, int k, int part) {
    const auto* halves = reinterpret_cast<const uint16_t*>(group + (FIVE ? 320 : 256));
    ipart q = column_nibble(group, k, part);
    if constexpr (FIVE) q = iadd(q, column_fifth_bit(group + 256, k, part));
    return fma(load_half(halves + PART * part), to_float(q), load_half(halves + 16 + PART * part));
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
    const auto offset = [&](int m) __attribute__((always_inline)) { return SIGNED_IS_OFFSET ? x.offset(m, index) : iset(0); };
    const Dots<M> dots = dot_vectors<Q8, M>(group, x.q(index), x.stride(), offset, PairedOrder{});
#pragma GCC unroll 4
    for (int part = 0; part < NUM_PARTS; part++) {
      const fpart scale = load_half(halves + PART * part);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) sums.sum[part][m] = fma(mul(to_float(dots.sum[part][m]), scale), x.scale(m, index), sums.sum[part][m]);
    }
  }
  static PAGODA_INLINE fpart column(const uint8_t* group, int, int k, int part) {
    const auto* halves = reinterpret_cast<const uint16_t*>(group + 512);
    const ipart bytes = load_ints(group + 64 * (k / 4) + 4 * PART * part);
    return mul(load_half(halves + PART * part), to_float(sign_of_top_byte(shift_up(bytes, 24 - 8 * (k % 4)))));
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
    const Dots<M> dots = dot_vectors<SuperWithMinimum, M>(group, x.q(index), x.stride(), FromZero{}, PairedOrder{});
    add_with_minimum<M>(
        sums, dots, [&](int part) { return mul(load_half(halves + PART * part), load_u8(scales + PART * part)); },
        [&](int part) { return sub(set(0.0f), mul(load_half(halves + 16 + PART * part), load_u8(scales + 16 + PART * part))); }, x, index);
  }
  static PAGODA_INLINE fpart column(const uint8_t* super, int g, int k, int part) {
    const auto* halves = reinterpret_cast<const uint16_t*>(super);
    const uint8_t* group = super + 64 + (288 + BITS_BYTES) * g;
    const uint8_t* scales = group + 256 + BITS_BYTES;
    ipart q = column_nibble(group, k, part);
    if constexpr (FIVE) q = iadd(q, column_fifth_bit(group + 256, k, part));
    const fpart scale = mul(load_half(halves + PART * part), load_u8(scales + PART * part));
    return sub(mul(scale, to_float(q)), mul(load_half(halves + 16 + PART * part), load_u8(scales + 16 + PART * part)));
  }
};

// Two signed scales a group. Quants are 32 too large, which sums make up for from the start.
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
    const auto first_offset = [&](int m) __attribute__((always_inline)) { return x.half_offset(m, i, 0); };
    const auto second_offset = [&](int m) __attribute__((always_inline)) { return x.half_offset(m, i, 1); };
    const Dots<M> first = dot_vectors<Q6K, M>(group, x.q(i), x.stride(), first_offset, FirstHalf{});
    fpart scaled[NUM_PARTS][M];
#pragma GCC unroll 4
    for (int part = 0; part < NUM_PARTS; part++) {
      const fpart scale = mul(load_half(halves + PART * part), load_i8(scales + PART * part));
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) scaled[part][m] = mul(to_float(first.sum[part][m]), scale);
    }
    const Dots<M> second = dot_vectors<Q6K, M>(group, x.q(i), x.stride(), second_offset, SecondHalf{});
#pragma GCC unroll 4
    for (int part = 0; part < NUM_PARTS; part++) {
      const fpart scale = mul(load_half(halves + PART * part), load_i8(scales + 16 + PART * part));
#pragma GCC unroll 8
      for (int m = 0; m < M; m++)
        sums.sum[part][m] = fma(fma(to_float(second.sum[part][m]), scale, scaled[part][m]), x.scale(m, i), sums.sum[part][m]);
    }
  }
  static PAGODA_INLINE fpart column(const uint8_t* super, int g, int k, int part) {
    const auto* halves = reinterpret_cast<const uint16_t*>(super);
    const uint8_t* group = super + 32 + 416 * g;
    const auto* scales = reinterpret_cast<const int8_t*>(group + 384 + 16 * (k / 16));
    const ipart q = isub(iadd(column_nibble(group, k, part), column_two_bits(group + 256, k, part)), iset(32));
    return mul(mul(load_half(halves + PART * part), load_i8(scales + PART * part)), to_float(q));
  }
};

constexpr int ROWS_AT_ONCE = 64, PANELS_AT_ONCE = 8;  // of which the sums are begun together, in 32 KiB

// sums[16 p ..] of one row = its outliers times panels [first, first + num_panels), in the order of columns.
template <class F>
inline void begin_sums(const PackedWeight& w, const QuantRows& row, int first, int num_panels, float* sums) {
  for (int i = 0; i < num_panels * NUM_PARTS; i++) store(sums + PART * i, set(0.0f));
  constexpr int INPUTS = block_inputs(F::format);
  const size_t panel_bytes = w.panel_bytes();
  for (int i = 0; i < *row.num_outliers; i++) {
    const int column = row.outlier_cols[i], g = column % INPUTS / GROUP, k = column % GROUP;
    const uint8_t* block = w.panel(first) + block_bytes(F::format) * static_cast<size_t>(column / INPUTS);
    const fpart x = set(row.outlier_values[i]);
    for (int p = 0; p < num_panels; p++, block += panel_bytes)
#pragma GCC unroll 4
      for (int part = 0; part < NUM_PARTS; part++) {
        float* sum = sums + PANEL * p + PART * part;
        store(sum, fma(F::column(block, g, k, part), x, load(sum)));
      }
  }
}

// Weights that a tile asks for while it multiplies others, a few cache lines a group: a burst would stall the core.
// Few rows need what comes next in this panel; many rows need the next panel, of which each tile asks for a part.
struct Ahead {
  const uint8_t* p;
  int lines_per_group;
  size_t bytes_per_tile;
};
inline Ahead ask_ahead(const PackedWeight& w, int panel, int num_rows) {
  const int num_groups = w.cols / GROUP, num_tiles = (num_rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS, groups = num_groups * num_tiles;
  const int lines = (static_cast<int>(w.panel_bytes() / 64) + groups - 1) / groups;
  return {w.panel(panel) + (num_rows <= 2 ? PREFETCH_BYTES : w.panel_bytes()), lines, static_cast<size_t>(64 * lines * num_groups)};
}

// M rows times one panel. `begun` holds what their sums start from, PANELS_AT_ONCE panels a row.
template <class F, int M>
inline void quant_tile(const uint8_t* panel, int num_blocks, const QuantRows& rows, const float* begun, int row, int column, const LinearTarget& o,
                       Ahead ahead) {
  Sums<M> sums;
  for (int part = 0; part < NUM_PARTS; part++)
    for (int m = 0; m < M; m++) sums.sum[part][m] = load(begun + PANELS_AT_ONCE * PANEL * m + PART * part);
  constexpr int GROUPS = block_inputs(F::format) / GROUP;
  const RowsOfX x{rows};
  for (int b = 0; b < num_blocks; b++)
    for (int g = 0; g < GROUPS; g++) {
      for (int i = 0; i < ahead.lines_per_group; i++) __builtin_prefetch(ahead.p + 64 * i, 0, 2);
      ahead.p += 64 * ahead.lines_per_group;
      F::template add_group<M>(panel + block_bytes(F::format) * static_cast<size_t>(b), g, x, GROUPS * b + g, sums);
    }
  for (int part = 0; part < NUM_PARTS; part++)
    for (int m = 0; m < M; m++) store_result(o, row + m, column + PART * part, sums.sum[part][m]);
}

// Rows [row, row + num_rows) times panel p, in tiles as tall as fit.
template <class F, int M = MAX_TILE_ROWS>
inline void quant_tiles(const uint8_t* panel, int num_blocks, const QuantRows& all, const float* begun, int row, int num_rows, int column,
                        const LinearTarget& o, Ahead ahead) {
  for (; num_rows >= M; row += M, num_rows -= M, begun += M * PANELS_AT_ONCE * PANEL, ahead.p += ahead.bytes_per_tile)
    quant_tile<F, M>(panel, num_blocks, all.from_row(row), begun, row, column, o, ahead);
  if constexpr (M > 1)
    if (num_rows > 0) quant_tiles<F, (M > 4 ? 4 : M - 1)>(panel, num_blocks, all, begun, row, num_rows, column, o, ahead);
}

template <class F>
inline void quant_panels(const PackedWeight& w, const QuantRows& all, int row0, int row1, int panel0, int panel1, const LinearTarget& o) {
  alignas(64) float begun[ROWS_AT_ONCE * PANELS_AT_ONCE * PANEL];
  const int num_blocks = w.cols / block_inputs(w.format);
  for (int first = panel0; first < panel1; first += PANELS_AT_ONCE) {
    const int num_panels = panel1 - first < PANELS_AT_ONCE ? panel1 - first : PANELS_AT_ONCE;
    for (int row = row0; row < row1; row += ROWS_AT_ONCE) {
      const int num_rows = row1 - row < ROWS_AT_ONCE ? row1 - row : ROWS_AT_ONCE;
      for (int m = 0; m < num_rows; m++) begin_sums<F>(w, all.from_row(row + m), first, num_panels, begun + m * PANELS_AT_ONCE * PANEL);
      for (int p = 0; p < num_panels; p++)
        quant_tiles<F>(w.panel(first + p), num_blocks, all, begun + PANEL * p, row, num_rows, PANEL * (first + p), o,
                       row == row0 ? ask_ahead(w, first + p, num_rows) : Ahead{});
    }
  }
}

// Rows [row0, row1) times panels [panel0, panel1). `quant` is read for quantised formats, `x` for floats.
inline void linear(const PackedWeight& w, const QuantRows& quant, const float* x, size_t stride, int row0, int row1, int panel0,
                   int panel1, const LinearTarget& o) {
  switch (w.format) {
    case Format::F32: return float_panels<Format::F32>(w, x, stride, row0, row1, panel0, panel1, o);
    case Format::F16: return float_panels<Format::F16>(w, x, stride, row0, row1, panel0, panel1, o);
    case Format::BF16: return bf16_panels(w, x, stride, row0, row1, panel0, panel1, o);
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
