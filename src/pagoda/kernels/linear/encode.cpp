#include "encode.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../common/half.h"
#include "../common/tensors.h"
#include "pack.h"

namespace pagoda {
namespace {

using Group = float[GROUP];

// To the nearest integer, halves to even; written so that it becomes two additions.
float round_even(float x) {
  const float big = 12582912.0f;  // 1.5 * 2^23
  return (x + big) - big;
}

void put_half(uint8_t* at, float x) {
  const uint16_t h = float_to_half(x);
  std::memcpy(at, &h, 2);
}
float as_half(float x) { return half_to_float(float_to_half(x)); }

// By halves, in an order that numpy can follow: value i takes value i + 16, then i + 8 and so on.
float tree_sum(const Group& values) {
  float sum[GROUP / 2];
  for (int i = 0; i < 16; i++) sum[i] = values[i] + values[i + 16];
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++) sum[i] += sum[i + n];
  return sum[0];
}

bool all_finite(const Group& x) {
  bool finite = true;
  for (float v : x) finite &= std::fabs(v) <= 3.4028235e38f;
  return finite;
}

void encode_q8_0(const Group& x, uint8_t* block) {
  float largest = 0;
  for (float v : x) largest = std::max(largest, std::fabs(v));
  const float scale = all_finite(x) ? as_half(largest / 127.0f) : NAN, divisor = scale == 0 ? 1.0f : scale;
  put_half(block, scale);
  for (int k = 0; k < GROUP; k++) {
    const float q = std::min(127.0f, std::max(-127.0f, round_even(x[k] / divisor)));
    block[2 + k] = static_cast<uint8_t>(static_cast<int8_t>(static_cast<int>(q)));
  }
}

struct Fit {
  float scale, low, error;
  float q[GROUP];
};

// Nearest quants for a scale and a minimum, both rounded to half precision, and the squared error they leave.
void fit_quants(const Group& x, float scale, float low, Fit& fit) {
  fit.scale = as_half(scale);
  fit.low = as_half(low);
  const float divisor = fit.scale == 0 ? 1.0f : fit.scale;
  Group squares;
  for (int k = 0; k < GROUP; k++) {
    fit.q[k] = std::min(15.0f, std::max(0.0f, round_even((x[k] - fit.low) / divisor)));
    const float lost = fit.q[k] * fit.scale + fit.low - x[k];
    squares[k] = lost * lost;
  }
  fit.error = tree_sum(squares);
}

// The regression line of values on quants.
void least_squares(const Group& x, const Group& q, float* slope, float* low) {
  const float mean_q = tree_sum(q) * (1.0f / 32), mean_x = tree_sum(x) * (1.0f / 32);
  Group products, squares;
  for (int k = 0; k < GROUP; k++) {
    products[k] = (q[k] - mean_q) * (x[k] - mean_x);
    squares[k] = (q[k] - mean_q) * (q[k] - mean_q);
  }
  const float spread = tree_sum(squares);
  *slope = tree_sum(products) / (spread == 0 ? 1.0f : spread);
  *low = mean_x - *slope * mean_q;
}

void encode_q4_1(Group& x, uint8_t* block) {
  if (!all_finite(x)) {
    std::memset(block, 0, 20);
    put_half(block, NAN);
    put_half(block + 2, NAN);
    return;
  }
  for (float& v : x) v += 0.0f;  // so that no zero is negative
  float low = x[0], high = x[0];
  for (float v : x) {
    low = std::min(low, v);
    high = std::max(high, v);
  }
  Fit extremes, fitted;
  low = as_half(low);
  fit_quants(x, (high - low) / 15.0f, low, extremes);
  float slope, intercept;
  least_squares(x, extremes.q, &slope, &intercept);
  fit_quants(x, slope, intercept + 0.0f, fitted);
  const Fit& best = fitted.error < extremes.error ? fitted : extremes;
  put_half(block, best.scale);
  put_half(block + 2, best.low);
  for (int k = 0; k < 16; k++)
    block[4 + k] = static_cast<uint8_t>(static_cast<int>(best.q[k]) | (static_cast<int>(best.q[k + 16]) << 4));
}

void read_group(FileType type, const uint8_t* values, Group& out) {
  if (type == FileType::F32) {
    std::memcpy(out, values, sizeof(Group));
    return;
  }
  for (int k = 0; k < GROUP; k++) {
    uint16_t bits;
    std::memcpy(&bits, values + 2 * k, 2);
    out[k] = type == FileType::F16 ? half_to_float(bits) : bfloat_to_float(bits);
  }
}

}  // namespace

bool encode_groups(int from_type, const uint8_t* values, size_t num_groups, int to_type, uint8_t* blocks) {
  const auto from = static_cast<FileType>(from_type), to = static_cast<FileType>(to_type);
  if ((from != FileType::F32 && from != FileType::F16 && from != FileType::BF16) ||
      (to != FileType::Q8_0 && to != FileType::Q4_1))
    return false;
  const size_t in_bytes = (from == FileType::F32 ? 4 : 2) * GROUP, out_bytes = to == FileType::Q8_0 ? 34 : 20;
  Group x;
  for (size_t g = 0; g < num_groups; g++) {
    read_group(from, values + in_bytes * g, x);
    if (to == FileType::Q8_0) encode_q8_0(x, blocks + out_bytes * g);
    else encode_q4_1(x, blocks + out_bytes * g);
  }
  return true;
}

}  // namespace pagoda
