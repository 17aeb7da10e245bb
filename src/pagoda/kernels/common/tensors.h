// What kernels share: packed weights and rows of quantised activations.
#pragma once
#include <cstddef>
#include <cstdint>

namespace pagoda {

constexpr int GROUP = 32;  // inputs that share one activation scale
constexpr int PANEL = 16;  // output rows packed together
constexpr int SUPER = 256; // inputs of one K-quant super-block

// How weights lie in memory once packed; several file types share one format (Q4_0 and Q4_1 are Q4).
enum class Format : int { F32, F16, BF16, Q4, Q5, Q8, Q4K, Q5K, Q6K };

// A panel is PANEL output rows, its blocks one after the other along the inputs. Within a group of 32 inputs,
// byte 4 r + i of vector j (j < 8) belongs to row r and input 4 j + i, which is the lane order of a
// four-way byte dot product. Nibble vector j < 4 holds vector j in its low and vector j + 4 in its high nibbles.
//   Q4   group:  256 B nibbles, 16 f16 scales, 16 f16 minima
//   Q5   group:  256 B nibbles, 64 B fifth bits (bit j of byte b: vector j), 16 f16 scales, 16 f16 minima
//   Q8   group:  512 B signed bytes, 16 f16 scales
//   Q4K  super:  16 f16 d, 16 f16 dmin, 8 groups of (256 B nibbles, 16 B scales, 16 B minima)
//   Q5K  super:  16 f16 d, 16 f16 dmin, 8 groups of (256 B nibbles, 64 B fifth bits, 16 B scales, 16 B minima)
//   Q6K  super:  16 f16 d, 8 groups of (256 B nibbles, 128 B two-bit planes, 2 x 16 B signed scales)
//   F32, F16:  for each input, 16 values
//   BF16:  for each pair of inputs, 16 pairs
constexpr size_t block_bytes(Format f) {
  switch (f) {
    case Format::F32: case Format::BF16: return 64;
    case Format::F16: return 32;
    case Format::Q4: return 320;
    case Format::Q5: return 384;
    case Format::Q8: return 544;
    case Format::Q4K: return 64 + 8 * 288;
    case Format::Q5K: return 64 + 8 * 352;
    case Format::Q6K: return 32 + 8 * 416;
  }
  return 0;
}
constexpr int block_inputs(Format f) {
  switch (f) {
    case Format::F32: case Format::F16: return 1;
    case Format::BF16: return 2;
    case Format::Q4: case Format::Q5: case Format::Q8: return GROUP;
    default: return SUPER;
  }
}
constexpr bool is_float(Format f) { return f == Format::F32 || f == Format::F16 || f == Format::BF16; }

struct PackedWeight {
  Format format = Format::F32;
  int rows = 0, cols = 0;
  uint8_t* data = nullptr;  // owned by the model's arena

  int num_panels() const { return (rows + PANEL - 1) / PANEL; }
  size_t panel_bytes() const {
    const int inputs = block_inputs(format);
    return static_cast<size_t>((cols + inputs - 1) / inputs) * block_bytes(format);
  }
  size_t num_bytes() const { return panel_bytes() * static_cast<size_t>(num_panels()); }
  const uint8_t* panel(int i) const { return data + panel_bytes() * static_cast<size_t>(i); }
};

// Rows of activations in 8 bits: x ~ scale * q within a group of 32 inputs, q in [-127, 127]. Values that stand
// far out of their row would round everything else in their group away: they are 0 in q and kept as floats, in
// the order of their columns.
struct QuantRows {
  int cols = 0;
  int8_t* q = nullptr;          // [rows, cols]
  float* scale = nullptr;       // [rows, cols / 32]
  float* scaled_sum = nullptr;  // [rows, cols / 32] scale times the sum of q: pays for minima
  int32_t* offset = nullptr;       // [rows, cols / 32] -128 times the sum of q: pays for signed weights made unsigned
  int32_t* half_offset = nullptr;  // [rows, cols / 16] -32 times the sum of q in a half-group: for 6-bit weights
  int32_t* num_outliers = nullptr;    // [rows]
  int32_t* outlier_cols = nullptr;    // [rows, max_outliers(cols)]
  float* outlier_values = nullptr;    // [rows, max_outliers(cols)]

  static constexpr int max_outliers(int cols) { return cols / 16; }
  QuantRows from_row(int row) const {
    const size_t r = static_cast<size_t>(row), n = static_cast<size_t>(cols), most = static_cast<size_t>(max_outliers(cols));
    return {cols, q + r * n, scale + r * (n / 32), scaled_sum + r * (n / 32), offset + r * (n / 32), half_offset + r * (n / 16),
            num_outliers + r, outlier_cols + r * most, outlier_values + r * most};
  }
};

inline int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

}  // namespace pagoda
