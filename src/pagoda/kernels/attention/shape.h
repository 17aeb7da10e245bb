// Shapes and scratch memory of attention, shared by every instruction set.
#pragma once
#include <cstddef>
#include <cstdint>

namespace pagoda {

constexpr int KEY_CHUNK = 128;          // keys that share one softmax, at absolute positions
constexpr int MAX_ATTENTION_ROWS = 48;  // query tokens of a tile times query heads of a KV head
constexpr int MAX_HEAD_DIM = 512;
constexpr float MAX_INT = 4095.0f;      // 13 bits with the sign: 64 products of two fill an int32
constexpr int DOT_LENGTH = 64;          // products summed as integers; beyond that sums go on in floats

struct AttentionShape {
  int num_heads, num_kv_heads, head_dim, block_size;
  float scale, softcap;  // softcap 0: none
  int window;            // 0: all positions

  // int16 of the keys, or the values, of one KV head in one block.
  size_t head_values() const { return static_cast<size_t>(block_size) * static_cast<size_t>(head_dim); }
  // int16 of one KV head in one block: keys, values, and a float scale for each key and each value.
  size_t head_size() const { return 2 * head_values() + 4 * static_cast<size_t>(block_size); }
};

struct KVLayer {
  int16_t* base;        // this layer's part of block 0
  size_t block_stride;  // in int16
};

// What one task attends with: queries of one KV head, over some chunks of keys that one block table leads to.
struct AttentionQuery {
  const float* q;  // row of all heads
  float* out;      // Result: row of all heads. Else a PartialChunk for each part
  int position;
};

// Result: attention over all keys. Joined: one part, of all chunks. Chunks: a part of each chunk.
enum class AttentionOutput { Result, Joined, Chunks };

struct AttentionTile {
  const int32_t* block_table;
  int num_tokens, kv_head, chunk0, chunk1;
  AttentionOutput output;
  AttentionQuery queries[MAX_ATTENTION_ROWS];  // by position, unless all of them see all of the chunks
};

struct AttentionScratch {
  int16_t* queries;  // [MAX_ATTENTION_ROWS][head_dim]
  int16_t* weights;  // [MAX_ATTENTION_ROWS][KEY_CHUNK]
  float* scores;     // [MAX_ATTENTION_ROWS][KEY_CHUNK]
  float* chunk_out;  // [MAX_ATTENTION_ROWS][head_dim rounded up to 16]
  float* out;        // the same
  alignas(64) float query_scale[MAX_ATTENTION_ROWS], maximum[MAX_ATTENTION_ROWS];
  alignas(64) float total[MAX_ATTENTION_ROWS][16];  // of probabilities, by lane
};

// What is kept of some chunks of keys and the query heads of one token and KV head until all chunks are joined, in
// floats; places of maxima and units are rounded up to 16:
//   maxima [heads]   units [heads]   totals [heads][16 lanes]   results [heads][width], in units
struct PartialChunk {
  size_t heads, width;
  PartialChunk(int heads, int width) : heads(static_cast<size_t>(heads)), width(static_cast<size_t>(width)) {}
  size_t units() const { return (heads + 15) / 16 * 16; }
  size_t totals() const { return 2 * units(); }
  size_t results() const { return totals() + 16 * heads; }
  size_t size() const { return results() + width * heads; }
};

}  // namespace pagoda
