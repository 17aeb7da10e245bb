// One pass over a row of logits, and the integer weights of its tokens. reference.py says which operations in
// float64 make a weight; each is done here in the same order, so weights are equal bit for bit.
#pragma once
#include "../common/simd.h"
#include "args.h"

namespace pagoda {
namespace PAGODA_ISA {

constexpr float LARGEST_FLOAT = 3.40282347e38f;
constexpr float FORBIDDEN = -__builtin_inff();
constexpr double WEIGHT_ONE = 17592186044416.0;  // 2^44, the weight of the likeliest token

struct TokenLogits {
  const float* logits;
  int vocab_size, num_blocks;
  const float* block_max;   // [num_blocks]
  float largest, smallest;  // smallest: -LARGEST_FLOAT when a token is forbidden
  int best_block;           // the first that holds `largest`
  bool is_choosable;        // no NaN, no +inf, and some token is not forbidden
};

// The tokens of block b: `size` of them, and TOKEN_BLOCK readable values.
struct TokenBlock {
  const float* logits;
  int size;
};

// Where the vocabulary ends inside a block, a copy in `padded` is filled up with the block's first value.
inline TokenBlock token_block(const float* logits, int vocab_size, int b, float* padded) {
  const float* block = logits + static_cast<size_t>(b) * TOKEN_BLOCK;
  const int size = vocab_size - b * TOKEN_BLOCK;
  if (size >= TOKEN_BLOCK) return {block, TOKEN_BLOCK};
  for (int i = 0; i < TOKEN_BLOCK; i++) padded[i] = block[i < size ? i : 0];
  return {padded, size};
}

inline TokenLogits scan_logits(const float* logits, int vocab_size, float* block_max) {
  TokenLogits t{logits, vocab_size, (vocab_size + TOKEN_BLOCK - 1) / TOKEN_BLOCK, block_max, FORBIDDEN, 0.0f, 0, false};
  const f32x16 zero = set16(0.0f), lowest = set16(-LARGEST_FLOAT);
  f32x16 poison = zero, smallest = set16(LARGEST_FLOAT);
  float padded[TOKEN_BLOCK];
  for (int b = 0; b < t.num_blocks; b++) {
    const float* block = token_block(logits, vocab_size, b, padded).logits;
    f32x16 largest = load16(block);
#pragma GCC unroll 4
    for (int i = 0; i < TOKEN_BLOCK; i += 16) {
      const f32x16 x = load16(block + i), bounded = max(lowest, x);  // NaN and +inf stay, and times 0 are NaN
      largest = max(largest, x);
      smallest = min(smallest, bounded);
      poison = add(poison, mul(bounded, zero));
    }
    block_max[b] = reduce_max(largest);
    if (block_max[b] > t.largest) {
      t.largest = block_max[b];
      t.best_block = b;
    }
  }
  t.smallest = -reduce_max(sub(zero, smallest));
  t.is_choosable = reduce_add(poison) == 0.0f && t.largest > FORBIDDEN;
  return t;
}

inline int first_largest(const TokenLogits& t) {
  int i = t.best_block * TOKEN_BLOCK;
  while (t.logits[i] != t.largest) i++;
  return i;
}

struct TokenWeights {
  double largest, inverse_temperature;
  int64_t min_weight;  // smaller weights are 0
};

PAGODA_INLINE int64_t bits_of(double x) {
  int64_t bits;
  __builtin_memcpy(&bits, &x, 8);
  return bits;
}
PAGODA_INLINE double double_of(int64_t bits) {
  double x;
  __builtin_memcpy(&x, &bits, 8);
  return x;
}

PAGODA_INLINE double exponent_of(float logit, double largest, double inverse_temperature) {
  const double scaled = (static_cast<double>(logit) - largest) * inverse_temperature;
  return scaled > -32.0 ? scaled : -32.0;
}

// round(2^44 * exp(x)). Adding 1.5 * 2^52 rounds to an integer, adding 2^8 to a multiple of 2^-44, and the low
// bits of either sum are that integer.
PAGODA_INLINE int64_t weigh(double x) {
  constexpr double INTEGER = 6755399441055744.0, FRACTION = 256.0;
  const double shifted = x * 1.4426950408889634 + INTEGER, n = shifted - INTEGER;
  const double f = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  double p = 1.0 / 5040;
  p = p * f + 1.0 / 720;
  p = p * f + 1.0 / 120;
  p = p * f + 1.0 / 24;
  p = p * f + 1.0 / 6;
  p = p * f + 0.5;
  p = p * f + 1.0;
  p = p * f + 1.0;
  const uint64_t exponent = static_cast<uint64_t>(bits_of(shifted) - bits_of(INTEGER) + 1023) << 52;
  return bits_of(p * double_of(static_cast<int64_t>(exponent)) + FRACTION) - bits_of(FRACTION);
}

PAGODA_INLINE int64_t weight_of(float logit, const TokenWeights& w) {
  const int64_t weight = weigh(exponent_of(logit, w.largest, w.inverse_temperature));
  return weight < w.min_weight ? 0 : weight;
}

inline void weigh_block(const float* block, const TokenWeights& w, int64_t* weights) {
  const double largest = w.largest, inverse_temperature = w.inverse_temperature;
  const int64_t min_weight = w.min_weight;
  double exponents[TOKEN_BLOCK];  // in a loop of its own, since compilers vectorise no loop with a branch
  for (int i = 0; i < TOKEN_BLOCK; i++) exponents[i] = exponent_of(block[i], largest, inverse_temperature);
  for (int i = 0; i < TOKEN_BLOCK; i++) weights[i] = weigh(exponents[i]);
  if (min_weight > 1)
    for (int i = 0; i < TOKEN_BLOCK; i++) weights[i] = weights[i] < min_weight ? 0 : weights[i];
}

// Every weight of a block is 0 when even its largest logit is where `exponent_of` stops telling logits apart.
PAGODA_INLINE bool is_weightless(float block_max, const TokenWeights& w) {
  return (static_cast<double>(block_max) - w.largest) * w.inverse_temperature < -32.0;
}

inline int64_t total_weight(const TokenLogits& t, const TokenWeights& w) {
  int64_t total = 0, weights[TOKEN_BLOCK];
  float padded[TOKEN_BLOCK];
  for (int b = 0; b < t.num_blocks; b++) {
    if (is_weightless(t.block_max[b], w)) continue;
    const TokenBlock block = token_block(t.logits, t.vocab_size, b, padded);
    weigh_block(block.logits, w, weights);
    for (int i = 0; i < block.size; i++) total += weights[i];
  }
  return total;
}

}  // namespace PAGODA_ISA
}  // namespace pagoda
