#include "pack.h"

#include <cstring>

#include "../common/half.h"

namespace pagoda {
namespace {

uint16_t read_u16(const uint8_t* p) {
  uint16_t x;
  std::memcpy(&x, p, 2);
  return x;
}
void write_u16(uint8_t* p, uint16_t x) { std::memcpy(p, &x, 2); }

// Quant k of a group goes to byte 4 r + k % 4 of vector k / 4.
void put_nibble(uint8_t* group, int r, int k, int value) {
  const int vector = k / 4, byte = 4 * r + k % 4;
  group[64 * (vector % 4) + byte] = static_cast<uint8_t>(group[64 * (vector % 4) + byte] | (value << (vector < 4 ? 0 : 4)));
}
int get_nibble(const uint8_t* group, int r, int k) {
  const int vector = k / 4, byte = 4 * r + k % 4;
  return (group[64 * (vector % 4) + byte] >> (vector < 4 ? 0 : 4)) & 15;
}
void put_bit(uint8_t* plane, int r, int k, int bit) {
  plane[4 * r + k % 4] = static_cast<uint8_t>(plane[4 * r + k % 4] | (bit << (k / 4)));
}
int get_bit(const uint8_t* plane, int r, int k) { return (plane[4 * r + k % 4] >> (k / 4)) & 1; }
// Two bits of quant k: vectors 0..3 in the first 64 bytes, 4..7 in the second, two bits each.
void put_two_bits(uint8_t* plane, int r, int k, int bits) {
  const int vector = k / 4, byte = 64 * (vector / 4) + 4 * r + k % 4;
  plane[byte] = static_cast<uint8_t>(plane[byte] | (bits << (2 * (vector % 4))));
}
int get_two_bits(const uint8_t* plane, int r, int k) {
  const int vector = k / 4;
  return (plane[64 * (vector / 4) + 4 * r + k % 4] >> (2 * (vector % 4))) & 3;
}

// A scale times a power of two, still exact as a half unless it leaves the format's range.
uint16_t scaled_half(uint16_t h, float factor) { return float_to_half(half_to_float(h) * factor); }

// The legacy types keep quants k and k + 16 in one byte, which are the two nibbles that a packed byte holds too.
void copy_nibbles(const uint8_t* nibbles, uint8_t* group, int r) {
  for (int vector = 0; vector < 4; vector++) std::memcpy(group + 64 * vector + 4 * r, nibbles + 4 * vector, 4);
}

void pack_group_4(const uint8_t* nibbles, uint16_t scale, uint16_t minimum, uint8_t* out, int r) {
  copy_nibbles(nibbles, out, r);
  write_u16(out + 256 + 2 * r, scale);
  write_u16(out + 288 + 2 * r, minimum);
}

void pack_group_5(const uint8_t* high_bits, const uint8_t* nibbles, uint16_t scale, uint16_t minimum, uint8_t* out, int r) {
  copy_nibbles(nibbles, out, r);
  for (int k = 0; k < 32; k++) put_bit(out + 256, r, k, (high_bits[k / 8] >> (k % 8)) & 1);
  write_u16(out + 320 + 2 * r, scale);
  write_u16(out + 352 + 2 * r, minimum);
}

void pack_group_8(const uint8_t* quants, uint16_t scale, uint8_t* out, int r) {
  for (int vector = 0; vector < 8; vector++) std::memcpy(out + 64 * vector + 4 * r, quants + 4 * vector, 4);
  write_u16(out + 512 + 2 * r, scale);
}

// Six-bit scale and minimum of group g of a K-quant super-block.
void scale_min(int g, const uint8_t* s, uint8_t* scale, uint8_t* minimum) {
  if (g < 4) {
    *scale = s[g] & 63;
    *minimum = s[g + 4] & 63;
  } else {
    *scale = static_cast<uint8_t>((s[g + 4] & 15) | ((s[g - 4] >> 6) << 4));
    *minimum = static_cast<uint8_t>((s[g + 4] >> 4) | ((s[g] >> 6) << 4));
  }
}

void pack_super_4(const uint8_t* in, uint8_t* out, int r) {
  write_u16(out + 2 * r, read_u16(in));
  write_u16(out + 32 + 2 * r, read_u16(in + 2));
  for (int g = 0; g < 8; g++) {
    uint8_t* group = out + 64 + 288 * g;
    const uint8_t* nibbles = in + 16 + 32 * (g / 2);
    for (int k = 0; k < 32; k++) put_nibble(group, r, k, g % 2 ? nibbles[k] >> 4 : nibbles[k] & 15);
    scale_min(g, in + 4, group + 256 + r, group + 272 + r);
  }
}

void pack_super_5(const uint8_t* in, uint8_t* out, int r) {
  write_u16(out + 2 * r, read_u16(in));
  write_u16(out + 32 + 2 * r, read_u16(in + 2));
  for (int g = 0; g < 8; g++) {
    uint8_t* group = out + 64 + 352 * g;
    const uint8_t* nibbles = in + 48 + 32 * (g / 2);
    for (int k = 0; k < 32; k++) {
      put_nibble(group, r, k, g % 2 ? nibbles[k] >> 4 : nibbles[k] & 15);
      put_bit(group + 256, r, k, (in[16 + k] >> g) & 1);
    }
    scale_min(g, in + 4, group + 320 + r, group + 336 + r);
  }
}

void pack_super_6(const uint8_t* in, uint8_t* out, int r) {
  write_u16(out + 2 * r, read_u16(in + 208));
  for (int g = 0; g < 8; g++) {
    uint8_t* group = out + 32 + 416 * g;
    const int half = g / 4, quarter = g % 4;  // a half is 128 inputs: 64 B of low nibbles, 32 B of high bits
    const uint8_t* low = in + 64 * half + 32 * (quarter % 2);
    const uint8_t* high = in + 128 + 32 * half;
    for (int k = 0; k < 32; k++) {
      put_nibble(group, r, k, quarter < 2 ? low[k] & 15 : low[k] >> 4);
      put_two_bits(group + 256, r, k, (high[k] >> (2 * quarter)) & 3);
    }
    group[384 + r] = in[192 + 2 * g];
    group[400 + r] = in[192 + 2 * g + 1];
  }
}

// What nibbles stand for in IQ4_NL and IQ4_XS, and in MXFP4 (twice the values of its four-bit floats).
constexpr int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t FP4_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// The 32 quants of a group whose bytes hold quants k and k + 16, through a table.
void pack_looked_up(const int8_t* values, int factor, const uint8_t* nibbles, uint16_t scale, uint8_t* out, int r) {
  uint8_t quants[GROUP];
  for (int k = 0; k < 16; k++) {
    quants[k] = static_cast<uint8_t>(values[nibbles[k] & 15] * factor);
    quants[k + 16] = static_cast<uint8_t>(values[nibbles[k] >> 4] * factor);
  }
  pack_group_8(quants, scale, out, r);
}

// A super-block becomes eight Q8 groups. A product of its scales has up to 17 bits and is rounded to a half.
void pack_super_iq4(const uint8_t* in, uint8_t* out, int r) {
  for (int g = 0; g < 8; g++) {
    const int lower = (in[4 + g / 2] >> (4 * (g % 2))) & 15, upper = (in[2 + g / 4] >> (2 * (g % 4))) & 3;
    const uint16_t scale = scaled_half(read_u16(in), static_cast<float>((lower | (upper << 4)) - 32));
    pack_looked_up(IQ4_VALUES, 1, in + 8 + 16 * g, scale, out + block_bytes(Format::Q8) * static_cast<size_t>(g), r);
  }
}

// The scale is a power of two: one that a half cannot hold goes into the quants where there is room (12 * 8 < 128);
// what is smaller still is zero, what is larger becomes infinite and is found by the self-check at load.
void pack_group_fp4(const uint8_t* in, uint8_t* out, int r) {
  const int exponent = in[0] - 128, shift = exponent <= 15 ? 0 : exponent <= 18 ? exponent - 15 : 3;
  if (exponent < -24) return;
  const float scale = exponent - shift > 15 ? 65536.0f : bits_to_float(static_cast<uint32_t>(exponent - shift + 127) << 23);
  pack_looked_up(FP4_VALUES, 1 << shift, in + 1, float_to_half(scale), out, r);
}

void pack_block(FileType type, const uint8_t* in, uint8_t* out, int r) {
  switch (type) {
    case FileType::F32: std::memcpy(out + 4 * r, in, 4); break;
    case FileType::F16: std::memcpy(out + 2 * r, in, 2); break;
    case FileType::BF16: std::memcpy(out + 4 * r, in, 4); break;
    case FileType::Q4_0: pack_group_4(in + 2, read_u16(in), scaled_half(read_u16(in), -8.0f), out, r); break;
    case FileType::Q4_1: pack_group_4(in + 4, read_u16(in), read_u16(in + 2), out, r); break;
    case FileType::Q5_0: pack_group_5(in + 2, in + 6, read_u16(in), scaled_half(read_u16(in), -16.0f), out, r); break;
    case FileType::Q5_1: pack_group_5(in + 4, in + 8, read_u16(in), read_u16(in + 2), out, r); break;
    case FileType::Q8_0: pack_group_8(in + 2, read_u16(in), out, r); break;
    case FileType::Q4_K: pack_super_4(in, out, r); break;
    case FileType::Q5_K: pack_super_5(in, out, r); break;
    case FileType::Q6_K: pack_super_6(in, out, r); break;
    case FileType::IQ4_NL: pack_looked_up(IQ4_VALUES, 1, in + 2, read_u16(in), out, r); break;
    case FileType::IQ4_XS: pack_super_iq4(in, out, r); break;
    case FileType::MXFP4: pack_group_fp4(in, out, r); break;
  }
}

size_t file_block_bytes(FileType type) {
  switch (type) {
    case FileType::F32: return 4;
    case FileType::F16: return 2;
    case FileType::BF16: return 4;  // a pair
    case FileType::Q4_0: return 18;
    case FileType::Q4_1: return 20;
    case FileType::Q5_0: return 22;
    case FileType::Q5_1: return 24;
    case FileType::Q8_0: return 34;
    case FileType::Q4_K: return 144;
    case FileType::Q5_K: return 176;
    case FileType::Q6_K: return 210;
    case FileType::IQ4_NL: return 18;
    case FileType::IQ4_XS: return 136;
    case FileType::MXFP4: return 17;
  }
  return 0;
}

}  // namespace

bool packed_format(int file_type, Format* format) {
  switch (static_cast<FileType>(file_type)) {
    case FileType::F32: *format = Format::F32; return true;
    case FileType::F16: *format = Format::F16; return true;
    case FileType::BF16: *format = Format::BF16; return true;
    case FileType::Q4_0: case FileType::Q4_1: *format = Format::Q4; return true;
    case FileType::Q5_0: case FileType::Q5_1: *format = Format::Q5; return true;
    case FileType::Q8_0: case FileType::IQ4_NL: case FileType::IQ4_XS: case FileType::MXFP4: *format = Format::Q8; return true;
    case FileType::Q4_K: *format = Format::Q4K; return true;
    case FileType::Q5_K: *format = Format::Q5K; return true;
    case FileType::Q6_K: *format = Format::Q6K; return true;
  }
  return false;
}

void pack_panels(int file_type, const uint8_t* rows, size_t row_bytes, const PackedWeight& weight, int first, int last) {
  const auto type = static_cast<FileType>(file_type);
  const int inputs = type == FileType::IQ4_XS ? SUPER : block_inputs(weight.format);  // of a block of the file
  const size_t in_bytes = file_block_bytes(type);
  const size_t out_bytes = block_bytes(weight.format) * static_cast<size_t>(inputs / block_inputs(weight.format));
  const int num_blocks = weight.cols / inputs;  // whole ones: of an odd number of bf16 the last is half a pair
  for (int p = first; p < last; p++) {
    uint8_t* panel = weight.data + weight.panel_bytes() * static_cast<size_t>(p);
    std::memset(panel, 0, weight.panel_bytes());
    for (int b = 0; b < num_blocks; b++)
      for (int r = 0; r < PANEL && p * PANEL + r < weight.rows; r++)
        pack_block(type, rows + row_bytes * static_cast<size_t>(p * PANEL + r) + in_bytes * static_cast<size_t>(b),
                   panel + out_bytes * static_cast<size_t>(b), r);
    if (weight.cols % inputs != 0)
      for (int r = 0; r < PANEL && p * PANEL + r < weight.rows; r++)
        std::memcpy(panel + out_bytes * static_cast<size_t>(num_blocks) + 4 * r,
                    rows + row_bytes * static_cast<size_t>(p * PANEL + r) + in_bytes * static_cast<size_t>(num_blocks), 2);
  }
}

namespace {

void unpack_super(const PackedWeight& w, const uint8_t* block, int r, float* out) {
  const float d = half_to_float(read_u16(block + 2 * r));
  for (int g = 0; g < 8; g++) {
    float* o = out + GROUP * g;
    if (w.format == Format::Q6K) {
      const uint8_t* group = block + 32 + 416 * g;
      for (int k = 0; k < GROUP; k++) {
        const float scale = d * static_cast<float>(static_cast<int8_t>(group[384 + 16 * (k / 16) + r]));
        o[k] = scale * static_cast<float>((get_nibble(group, r, k) | (get_two_bits(group + 256, r, k) << 4)) - 32);
      }
      continue;
    }
    const bool five = w.format == Format::Q5K;
    const uint8_t* group = block + 64 + (five ? 352 : 288) * g;
    const uint8_t* scales = group + (five ? 320 : 256);
    const float scale = d * static_cast<float>(scales[r]);
    const float minimum = half_to_float(read_u16(block + 32 + 2 * r)) * static_cast<float>(scales[16 + r]);
    for (int k = 0; k < GROUP; k++) {
      const int q = get_nibble(group, r, k) | (five ? get_bit(group + 256, r, k) << 4 : 0);
      o[k] = scale * static_cast<float>(q) - minimum;
    }
  }
}

}  // namespace

void unpack_row(const PackedWeight& w, int row, float* out) {
  const uint8_t* block = w.panel(row / PANEL);
  const int r = row % PANEL, inputs = block_inputs(w.format);
  for (int c = 0; c < w.cols; c += inputs, block += block_bytes(w.format)) {
    switch (w.format) {
      case Format::F32: std::memcpy(out + c, block + 4 * r, 4); break;
      case Format::F16: out[c] = half_to_float(read_u16(block + 2 * r)); break;
      case Format::BF16:
        out[c] = bfloat_to_float(read_u16(block + 4 * r));
        if (c + 1 < w.cols) out[c + 1] = bfloat_to_float(read_u16(block + 4 * r + 2));
        break;
      case Format::Q4: case Format::Q5: {
        const int planes = w.format == Format::Q4 ? 256 : 320;
        const float scale = half_to_float(read_u16(block + planes + 2 * r));
        const float minimum = half_to_float(read_u16(block + planes + 32 + 2 * r));
        for (int k = 0; k < GROUP; k++) {
          const int q = get_nibble(block, r, k) | (planes == 320 ? get_bit(block + 256, r, k) << 4 : 0);
          out[c + k] = scale * static_cast<float>(q) + minimum;
        }
        break;
      }
      case Format::Q8: {
        const float scale = half_to_float(read_u16(block + 512 + 2 * r));
        for (int k = 0; k < GROUP; k++)
          out[c + k] = scale * static_cast<float>(static_cast<int8_t>(block[64 * (k / 4) + 4 * r + k % 4]));
        break;
      }
      default: unpack_super(w, block, r, out + c);
    }
  }
}

}  // namespace pagoda
