// What a sampler reads, writes and needs as working memory; shared by every instruction set.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

namespace pagoda {

constexpr int MAX_SAMPLE_VOCAB = (1 << 19) - 1;  // weights of 2^44 still add up within an int64
constexpr int TOKEN_BLOCK = 64;                  // tokens whose maximum is kept
constexpr int TOKEN_BUCKETS = 2048;              // of the histogram that finds a place in the order of tokens

// The arrays of a `SamplingBatch` and of its `SampleResult`; token ids are in range, and unique in a row's list.
struct SampleArgs {
  const float* logits;  // [rows, logits_stride], never written
  size_t logits_stride;
  int vocab_size;
  const float *temperature, *top_p, *min_p;
  const int32_t* top_k;
  const float *repetition_penalty, *presence_penalty, *frequency_penalty;
  const uint64_t *seed, *counter;
  const int32_t *history_start_loc, *history_token_ids, *history_output_counts;
  const int32_t *bias_start_loc, *bias_token_ids;
  const float* bias_values;
  const int32_t* num_logprobs;
  const uint32_t* allowed_mask;  // [rows, (vocab_size + 31) / 32], or null
  int32_t* token_ids;
  float* logprobs;
  int32_t* top_token_ids;  // [rows, max_logprobs]
  float* top_logprobs;     // the same
  int max_logprobs;
};

// Ascending keys are descending logits.
struct TokenCandidate {
  uint32_t key;
  int32_t token_id;
};

// Working memory of one thread; a row may leave anything in it. Memory is committed as it is used, and most rows
// use little, so a scratch is best kept for many rows.
struct SampleScratch {
  explicit SampleScratch(int vocab_size) {
    const size_t num_blocks = (static_cast<size_t>(vocab_size) + TOKEN_BLOCK - 1) / TOKEN_BLOCK, n = num_blocks * TOKEN_BLOCK;
    memory.reset(new char[TOKEN_BUCKETS * (sizeof(int64_t) + sizeof(int32_t)) + 2 * n * sizeof(TokenCandidate) +
                          (n + num_blocks) * sizeof(float)]);
    bucket_weights = reinterpret_cast<int64_t*>(memory.get());
    bucket_counts = reinterpret_cast<int32_t*>(bucket_weights + TOKEN_BUCKETS);
    candidates = reinterpret_cast<TokenCandidate*>(bucket_counts + TOKEN_BUCKETS);
    sorted = candidates + n;
    logits = reinterpret_cast<float*>(sorted + n);
    block_max = logits + n;
  }

  float* logits;                          // [vocab_size]
  float* block_max;                       // [blocks of TOKEN_BLOCK tokens]
  TokenCandidate *candidates, *sorted;    // [vocab_size]
  int64_t* bucket_weights;                // [TOKEN_BUCKETS]
  int32_t* bucket_counts;                 // the same
  std::unique_ptr<char[]> memory;
};

}  // namespace pagoda
