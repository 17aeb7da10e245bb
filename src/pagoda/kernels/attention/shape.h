// Shapes and scratch memory of attention, shared by every instruction set.
#pragma once
#include <cstddef>
#include <cstdint>

namespace pagoda {

constexpr int KEY_CHUNK = 128;          // keys that share one softmax, at absolute positions
constexpr int MAX_ATTENTION_ROWS = 48;  // query tokens of a tile times query heads of a KV head
constexpr int MAX_HEAD_DIM = 512;

struct AttentionShape {
  int num_heads, num_kv_heads, head_dim, block_size;
  float scale, softcap;  // softcap 0: none
  int window;            // 0: all positions

  // Keys, or values, of one KV head in one block.
  size_t head_values() const { return static_cast<size_t>(block_size) * static_cast<size_t>(head_dim); }
};

struct KVLayer {
  uint16_t* base;       // this layer's part of block 0
  size_t block_stride;  // in values
};

struct AttentionScratch {
  float* scores;     // [MAX_ATTENTION_ROWS][KEY_CHUNK]
  float* chunk_out;  // [MAX_ATTENTION_ROWS][head_dim rounded up to 16]
  float* out;        // the same
  float maximum[MAX_ATTENTION_ROWS], total[MAX_ATTENTION_ROWS];
};

}  // namespace pagoda
