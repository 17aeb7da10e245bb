// Tokens in descending order, found without sorting the vocabulary: a short list of the largest logits answers
// most questions about the order, a histogram over it finds the one bucket that answers the others.
#pragma once
#include "cpu_weights.h"

namespace pagoda {
namespace PAGODA_ISA {

PAGODA_INLINE uint32_t order_key(float logit) {
  const float x = logit + 0.0f;  // -0 becomes 0
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
}

// The largest key among those of the k largest values, digit by digit (radix select).
inline uint32_t kth_key(const float* values, int n, int k) {
  uint32_t prefix = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    int counts[256] = {};
    for (int i = 0; i < n; i++) {
      const uint32_t key = order_key(values[i]);
      if (static_cast<uint64_t>(key) >> (shift + 8) == prefix) counts[(key >> shift) & 255]++;
    }
    uint32_t digit = 0;
    for (; k > counts[digit]; digit++) k -= counts[digit];
    prefix = prefix << 8 | digit;
  }
  return prefix;
}

// Sorts by key; equal keys keep their order, which is that of ids. The result is in `list` or in `other`.
inline const TokenCandidate* sort_candidates(TokenCandidate* list, TokenCandidate* other, int n) {
  if (n <= 32) {
    for (int i = 1; i < n; i++) {
      const TokenCandidate c = list[i];
      int j = i;
      for (; j > 0 && list[j - 1].key > c.key; j--) list[j] = list[j - 1];
      list[j] = c;
    }
    return list;
  }
  int starts[4][256] = {};
  for (int i = 0; i < n; i++)
    for (int d = 0; d < 4; d++) starts[d][(list[i].key >> (8 * d)) & 255]++;
  for (int d = 0; d < 4; d++) {
    if (starts[d][(list[0].key >> (8 * d)) & 255] == n) continue;  // all share this digit
    for (int i = 0, start = 0; i < 256; i++) {
      const int count = starts[d][i];
      starts[d][i] = start;
      start += count;
    }
    for (int i = 0; i < n; i++) other[starts[d][(list[i].key >> (8 * d)) & 255]++] = list[i];
    TokenCandidate* const sorted = other;
    other = list;
    list = sorted;
  }
  return list;
}

struct TokenList {
  const TokenCandidate* tokens;
  int size;
};

// The beginning of the order, at least k tokens of it (all, if there are fewer). The k-th largest maximum of a
// block is a logit that k tokens reach.
inline TokenList largest_tokens(const TokenLogits& t, int k, SampleScratch& s) {
  const uint32_t limit = k <= t.num_blocks ? kth_key(t.block_max, t.num_blocks, k) : 0xffffffffu;
  int n = 0;
  for (int b = 0; b < t.num_blocks; b++) {
    if (order_key(t.block_max[b]) > limit) continue;
    const int end = t.vocab_size < (b + 1) * TOKEN_BLOCK ? t.vocab_size : (b + 1) * TOKEN_BLOCK;
    for (int i = b * TOKEN_BLOCK; i < end; i++) {
      const uint32_t key = order_key(t.logits[i]);
      if (key <= limit) s.candidates[n++] = {key, i};
    }
  }
  return {sort_candidates(s.candidates, s.sorted, n), n};
}

// Buckets cut the range of logits that have weight evenly; bucket 0 holds the largest, the last all the rest.
struct TokenBuckets {
  float largest, scale;
};

inline TokenBuckets token_buckets(const TokenLogits& t, const TokenWeights& w) {
  const double range = static_cast<double>(t.largest) - t.smallest, weighty = 33.0 / w.inverse_temperature;
  const double scale = TOKEN_BUCKETS / (range < weighty ? range : weighty);
  return {t.largest, scale < 1e30 ? static_cast<float>(scale) : 1e30f};
}
PAGODA_INLINE int bucket_of(float logit, const TokenBuckets& b) {
  const float place = (b.largest - logit) * b.scale;
  return place < TOKEN_BUCKETS - 1 ? static_cast<int>(place) : TOKEN_BUCKETS - 1;
}

inline void fill_buckets(const TokenLogits& t, const TokenWeights& w, const TokenBuckets& buckets, SampleScratch& s) {
  __builtin_memset(s.bucket_weights, 0, TOKEN_BUCKETS * sizeof(int64_t));
  __builtin_memset(s.bucket_counts, 0, TOKEN_BUCKETS * sizeof(int32_t));
  int64_t weights[TOKEN_BLOCK];
  float padded[TOKEN_BLOCK];
  for (int b = 0; b < t.num_blocks; b++) {
    const TokenBlock block = token_block(t.logits, t.vocab_size, b, padded);
    if (bucket_of(t.block_max[b], buckets) == TOKEN_BUCKETS - 1 && is_weightless(t.block_max[b], w)) {
      s.bucket_counts[TOKEN_BUCKETS - 1] += block.size;
      continue;
    }
    weigh_block(block.logits, w, weights);
    for (int i = 0; i < block.size; i++) {
      const int bucket = bucket_of(block.logits[i], buckets);
      s.bucket_weights[bucket] += weights[i];
      s.bucket_counts[bucket]++;
    }
  }
}

inline TokenList tokens_of_bucket(const TokenLogits& t, const TokenBuckets& buckets, int bucket, SampleScratch& s) {
  int n = 0;
  for (int b = 0; b < t.num_blocks; b++) {
    if (bucket_of(t.block_max[b], buckets) > bucket) continue;
    const int end = t.vocab_size < (b + 1) * TOKEN_BLOCK ? t.vocab_size : (b + 1) * TOKEN_BLOCK;
    for (int i = b * TOKEN_BLOCK; i < end; i++)
      if (bucket_of(t.logits[i], buckets) == bucket) s.candidates[n++] = {order_key(t.logits[i]), i};
  }
  return {sort_candidates(s.candidates, s.sorted, n), n};
}

// What can be asked about the order of one row. `top` answers while it can, the buckets after that.
struct TokenOrder {
  const TokenLogits& t;
  const TokenWeights& w;
  SampleScratch& s;
  TokenList top;
  bool has_buckets;
  TokenBuckets buckets;
};

// A walk along the order, from the first token on.
struct TokenWalk {
  int token_id;           // where it ended; -1: not yet, or in a place without weight
  int64_t count, weight;  // of the tokens passed, the last one included
};

// Continues `walk` over `list` until it has passed `count` tokens or as much as `weight`.
inline TokenWalk walk_list(const TokenOrder& o, const TokenList& list, TokenWalk walk, int64_t count, int64_t weight) {
  for (int i = 0; i < list.size; i++) {
    const int token_id = list.tokens[i].token_id;
    walk.count++;
    walk.weight += weight_of(o.t.logits[token_id], o.w);
    if (walk.count >= count || walk.weight >= weight) {
      walk.token_id = token_id;
      break;
    }
  }
  return walk;
}

// Walks until `count` tokens or as much as `weight` have been passed; the row has to hold so much.
inline TokenWalk walk_tokens(TokenOrder& o, int64_t count, int64_t weight) {
  TokenWalk walk = walk_list(o, o.top, {-1, 0, 0}, count, weight);
  if (walk.token_id >= 0) return walk;
  if (!o.has_buckets) {
    o.top.size = 0;  // its memory serves the buckets from now on
    o.has_buckets = true;
    o.buckets = token_buckets(o.t, o.w);
    fill_buckets(o.t, o.w, o.buckets, o.s);
  }
  walk = {-1, 0, 0};
  int b = 0;
  while (b < TOKEN_BUCKETS - 1 && walk.count + o.s.bucket_counts[b] < count && walk.weight + o.s.bucket_weights[b] < weight) {
    walk.count += o.s.bucket_counts[b];
    walk.weight += o.s.bucket_weights[b];
    b++;
  }
  // After how many tokens without weight a walk ends makes no difference, and there may be very many.
  if (o.s.bucket_weights[b] == 0) return walk;
  return walk_list(o, tokens_of_bucket(o.t, o.buckets, b, o.s), walk, count, weight);
}

}  // namespace PAGODA_ISA
}  // namespace pagoda
