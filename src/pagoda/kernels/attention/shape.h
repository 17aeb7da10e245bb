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

struct AttentionScratch {
  int16_t* queries;  // [MAX_ATTENTION_ROWS][head_dim]
  int16_t* weights;  // [MAX_ATTENTION_ROWS][KEY_CHUNK]
  float* scores;     // [MAX_ATTENTION_ROWS][KEY_CHUNK]
  float* chunk_out;  // [MAX_ATTENTION_ROWS][head_dim rounded up to 16]
  float* out;        // the same
  alignas(64) float query_scale[MAX_ATTENTION_ROWS], maximum[MAX_ATTENTION_ROWS];
  alignas(64) float total[MAX_ATTENTION_ROWS][16];  // of probabilities, by lane
};

// What is kept of one chunk of keys and a tile of query rows until all chunks are joined, in floats:
//   maxima [48, and 16 that may be read]   units [48, and 16]   totals [rows][16 lanes]   results [rows][width], in units
struct PartialChunk {
  static constexpr size_t UNITS = MAX_ATTENTION_ROWS + 16, TOTALS = 2 * UNITS;
  size_t rows, width;
  PartialChunk(int rows, int width) : rows(static_cast<size_t>(rows)), width(static_cast<size_t>(width)) {}
  size_t results() const { return TOTALS + 16 * rows; }
  size_t size() const { return results() + width * rows; }
};

}  // namespace pagoda
