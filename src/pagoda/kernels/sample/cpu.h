// Choosing the next token of a row; reference.py is the meaning, token for token.
#pragma once
#include "args.h"
#include "cpu_order.h"
#include "cpu_weights.h"

namespace pagoda {
namespace PAGODA_ISA {

constexpr int64_t ANY_AMOUNT = INT64_MAX;
constexpr int SHORT_LIST = 128;  // tokens that a draw from the whole vocabulary looks at first

PAGODA_INLINE uint64_t mix_bits(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}
PAGODA_INLINE uint64_t random_word(uint64_t seed, uint64_t counter) {
  constexpr uint64_t GAMMA = 0x9e3779b97f4a7c15u;
  return mix_bits(mix_bits(seed + GAMMA) + (counter + 1) * GAMMA);
}

// share * whole, rounded up.
PAGODA_INLINE int64_t share_of(float share, double whole) {
  const double exact = static_cast<double>(share) * whole;
  const int64_t floor = static_cast<int64_t>(exact);
  return static_cast<double>(floor) < exact ? floor + 1 : floor;
}

inline int draw_token(const SampleArgs& a, int row, const TokenLogits& t, SampleScratch& s) {
  const TokenWeights w{t.largest, 1.0 / static_cast<double>(a.temperature[row]), share_of(a.min_p[row], WEIGHT_ONE)};
  const int k = a.top_k[row] < t.vocab_size ? a.top_k[row] : 0;
  TokenOrder order{t, w, s, {nullptr, 0}, false, {0.0f, 0.0f}};
  if (k <= t.num_blocks) {
    const int some = t.num_blocks < SHORT_LIST ? t.num_blocks : SHORT_LIST;
    order.top = largest_tokens(t, k > 0 ? k : some, s);
  }
  int64_t total = k > 0 ? walk_tokens(order, k, ANY_AMOUNT).weight : total_weight(t, w);
  if (a.top_p[row] < 1.0f) {
    total = walk_tokens(order, ANY_AMOUNT, share_of(a.top_p[row], static_cast<double>(total))).weight;
  }
  const uint64_t word = random_word(a.seed[row], a.counter[row]);
  const uint64_t target = static_cast<uint64_t>(static_cast<unsigned __int128>(word) * static_cast<uint64_t>(total) >> 64);
  return walk_tokens(order, ANY_AMOUNT, static_cast<int64_t>(target) + 1).token_id;
}

inline void forbid_unmasked(const uint32_t* mask, int vocab_size, float* logits) {
  for (int start = 0; start < vocab_size; start += 32) {
    const uint32_t allowed = mask[start / 32];
    if (allowed == 0xffffffffu) continue;
    const int n = vocab_size - start < 32 ? vocab_size - start : 32;
    for (int i = 0; i < n; i++)
      if ((allowed >> i & 1u) == 0) logits[start + i] = FORBIDDEN;
  }
}

// Applies bias, mask and penalties to a copy in `edited`; false when the row has none of them.
inline bool edit_logits(const SampleArgs& a, int row, const float* raw, float* edited) {
  const int bias0 = a.bias_start_loc[row], bias1 = a.bias_start_loc[row + 1];
  const int history0 = a.history_start_loc[row], history1 = a.history_start_loc[row + 1];
  const float repetition = a.repetition_penalty[row], presence = a.presence_penalty[row], frequency = a.frequency_penalty[row];
  const bool has_penalties = history0 < history1 && (repetition != 1.0f || presence != 0.0f || frequency != 0.0f);
  if (bias0 == bias1 && !a.allowed_mask && !has_penalties) return false;

  __builtin_memcpy(edited, raw, static_cast<size_t>(a.vocab_size) * sizeof(float));
  for (int i = bias0; i < bias1; i++) edited[a.bias_token_ids[i]] += a.bias_values[i];
  if (a.allowed_mask) {
    const size_t num_words = (static_cast<size_t>(a.vocab_size) + 31) / 32;
    forbid_unmasked(a.allowed_mask + static_cast<size_t>(row) * num_words, a.vocab_size, edited);
  }
  if (has_penalties) {
    for (int i = history0; i < history1; i++) {
      float& logit = edited[a.history_token_ids[i]];
      const int count = a.history_output_counts[i];
      logit = logit > 0.0f ? logit / repetition : logit * repetition;
      logit -= frequency * static_cast<float>(count);
      logit -= count > 0 ? presence : 0.0f;
    }
  }
  return true;
}

// Writes a row's list of the likeliest tokens; returns the logarithm that turns logits into log-probabilities.
inline double list_top_logprobs(const SampleArgs& a, int row, const TokenLogits& raw, SampleScratch& s) {
  const double log_sum = __builtin_log(static_cast<double>(total_weight(raw, {raw.largest, 1.0, 0})) / WEIGHT_ONE);
  const int n = a.num_logprobs[row];
  if (n == 0) return log_sum;
  const TokenList top = largest_tokens(raw, n, s);
  const size_t start = static_cast<size_t>(row) * static_cast<size_t>(a.max_logprobs);
  for (int i = 0; i < n && i < top.size; i++) {
    const float logit = raw.logits[top.tokens[i].token_id];
    if (logit == FORBIDDEN) break;
    a.top_token_ids[start + static_cast<size_t>(i)] = top.tokens[i].token_id;
    a.top_logprobs[start + static_cast<size_t>(i)] = static_cast<float>((static_cast<double>(logit) - raw.largest) - log_sum);
  }
  return log_sum;
}

inline void clear_sample(const SampleArgs& a, int row) {
  a.token_ids[row] = -1;
  a.logprobs[row] = __builtin_nanf("");
  const size_t width = static_cast<size_t>(a.max_logprobs), start = static_cast<size_t>(row) * width;
  for (size_t i = start; i < start + width; i++) {
    a.top_token_ids[i] = -1;
    a.top_logprobs[i] = __builtin_nanf("");
  }
}

// Writes row `row` of the outputs. Rows are independent; threads take them in any order, each with its scratch.
inline void sample_row(const SampleArgs& a, int row, SampleScratch& s) {
  clear_sample(a, row);
  const float* raw = a.logits + static_cast<size_t>(row) * a.logits_stride;
  TokenLogits t = scan_logits(raw, a.vocab_size, s.block_max);
  if (!t.is_choosable) return;
  const double raw_largest = t.largest;
  const bool has_logprobs = a.num_logprobs[row] >= 0;
  const double log_sum = has_logprobs ? list_top_logprobs(a, row, t, s) : 0.0;
  if (edit_logits(a, row, raw, s.logits)) {
    t = scan_logits(s.logits, a.vocab_size, s.block_max);
    if (!t.is_choosable) {
      clear_sample(a, row);
      return;
    }
  }
  const int token_id = a.temperature[row] == 0.0f ? first_largest(t) : draw_token(a, row, t, s);
  a.token_ids[row] = token_id;
  if (has_logprobs) a.logprobs[row] = static_cast<float>((static_cast<double>(raw[token_id]) - raw_largest) - log_sum);
}

}  // namespace PAGODA_ISA
}  // namespace pagoda
