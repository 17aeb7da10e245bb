// Attention over a paged KV cache, flash-style: keys in chunks at absolute positions, a softmax for each chunk,
// and chunks merged in order (Dao et al. 2022). What a query computes depends only on its position, never on
// the queries beside it, on how the prompt was cut into steps or on how a long context is split over threads.
//
// A block of a layer holds for each KV head its keys [run of 16 tokens][head_dim][16], then its values
// [token][head_dim], both in f16. Keys are transposed so that 16 scores are one vector and no sum over lanes is
// needed; a head's keys and values lie together because one task reads both.
#pragma once
#include "../activation/cpu.h"
#include "../common/simd.h"
#include "../common/tensors.h"
#include "shape.h"

namespace pagoda {
namespace PAGODA_ISA {

inline void write_kv(const AttentionShape& s, const KVLayer& kv, int slot, const float* key, const float* value) {
  uint16_t* block = kv.base + static_cast<size_t>(slot / s.block_size) * kv.block_stride;
  const int offset = slot % s.block_size, run = offset / 16, lane = offset % 16, d = s.head_dim;
  const f32x16 largest = set16(65504.0f), smallest = set16(-65504.0f);  // an infinity would poison masked sums
  for (int h = 0; h < s.num_kv_heads; h++) {
    uint16_t* k = block + s.head_values() * static_cast<size_t>(2 * h) + static_cast<size_t>(run) * 16 * d + lane;
    uint16_t* v = block + s.head_values() * static_cast<size_t>(2 * h + 1) + static_cast<size_t>(offset) * d;
    for (int i = 0; i < d; i += 16) {
      const int n = d - i < 16 ? d - i : 16;
      uint16_t halves[16];
      store_half(halves, min(max(n == 16 ? load16(key + h * d + i) : load_first(key + h * d + i, n), smallest), largest));
      for (int j = 0; j < n; j++) k[16 * (i + j)] = halves[j];
      store_half(halves, min(max(n == 16 ? load16(value + h * d + i) : load_first(value + h * d + i, n), smallest), largest));
      std::memcpy(v + i, halves, 2 * static_cast<size_t>(n));
    }
  }
}

// scores[r][16 b ..] = q[r] . keys of run b, for R queries and B runs of 16 keys.
template <int R, int B>
inline void score_tile(const float* const* q, const uint16_t* const* runs, int head_dim, float* scores) {
  f32x16 acc[R][B];
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) acc[r][b] = set16(0.0f);
  for (int d = 0; d < head_dim; d++) {
    f32x16 k[B];
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) k[b] = load_half16(runs[b] + 16 * d);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const f32x16 x = set16(q[r][d]);
#pragma GCC unroll 4
      for (int b = 0; b < B; b++) acc[r][b] = fma(x, k[b], acc[r][b]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) store(scores + KEY_CHUNK * r + 16 * b, acc[r][b]);
}

// out[r][16 c ..] += sum over t of weights[r][t] * values[t][16 c ..], for R queries and C runs of 16 columns.
template <int R, int C, bool FULL>
inline void value_tile(const float* weights, const uint16_t* values, size_t stride, int num_tokens, int columns, float* out, size_t out_stride) {
  f32x16 acc[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = load16(out + static_cast<size_t>(r) * out_stride + 16 * c);
  for (int t = 0; t < num_tokens; t++) {
    f32x16 v[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      const uint16_t* p = values + static_cast<size_t>(t) * stride + 16 * c;
      v[c] = FULL ? load_half16(p) : load_half_first(p, columns);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const f32x16 w = set16(weights[KEY_CHUNK * r + t]);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) acc[r][c] = fma(w, v[c], acc[r][c]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(out + static_cast<size_t>(r) * out_stride + 16 * c, acc[r][c]);
}

#if defined(PAGODA_ISA_AVX512)
constexpr int MAX_QUERY_ROWS = 12;
#elif defined(__AVX2__)
constexpr int MAX_QUERY_ROWS = 6;
#else
constexpr int MAX_QUERY_ROWS = 2;
#endif

// Registers left by R queries go to more runs of keys or columns, so that FMA chains stay independent.
constexpr int runs_for(int rows) { return rows == 1 ? 4 : rows <= MAX_QUERY_ROWS / 2 ? 2 : 1; }

template <int R = MAX_QUERY_ROWS>
inline void score_rows(int rows, const float* const* q, const uint16_t* const* runs, int num_runs, int head_dim, float* scores) {
  if constexpr (R > 1) if (rows < R) return score_rows<R - 1>(rows, q, runs, num_runs, head_dim, scores);
  constexpr int B = runs_for(R);
  int b = 0;
  for (; b + B <= num_runs; b += B) score_tile<R, B>(q, runs + b, head_dim, scores + 16 * b);
  if constexpr (B > 1) for (; b < num_runs; b++) score_tile<R, 1>(q, runs + b, head_dim, scores + 16 * b);
}

template <int R = MAX_QUERY_ROWS>
inline void value_rows(int rows, const float* weights, const uint16_t* values, int head_dim, int num_tokens, float* out, size_t out_stride) {
  if constexpr (R > 1) if (rows < R) return value_rows<R - 1>(rows, weights, values, head_dim, num_tokens, out, out_stride);
  constexpr int C = runs_for(R);
  const size_t stride = static_cast<size_t>(head_dim);
  int d = 0;
  for (; d + 16 * C <= head_dim; d += 16 * C) value_tile<R, C, true>(weights, values + d, stride, num_tokens, 16, out + d, out_stride);
  if constexpr (C > 1) for (; d + 16 <= head_dim; d += 16) value_tile<R, 1, true>(weights, values + d, stride, num_tokens, 16, out + d, out_stride);
  if (d < head_dim) value_tile<R, 1, false>(weights, values + d, stride, num_tokens, head_dim - d, out + d, out_stride);
}

PAGODA_INLINE float exp_scalar(float x) {
  alignas(64) float lanes[PART];
  store(lanes, exp(set(x)));
  return lanes[0];
}

// Softmax of one row of a chunk over keys [low, high), relative to the chunk. Scores outside become weight 0.
inline void chunk_softmax(float* scores, int first, int last, int low, int high, float scale, float cap, float* maximum, float* total) {
  f32x16 largest = set16(-1e30f);
  for (int i = low / 16 * 16; i < high; i += 16) {
    f32x16 s = mul(load16(scores + i), set16(scale));
    if (cap > 0.0f) s = softcap(s, cap);
    s = keep_range(s, i, low, high, -1e38f);
    store(scores + i, s);
    largest = max(largest, s);
  }
  *maximum = reduce_max(largest);
  f32x16 sum = set16(0.0f);
  for (int i = first; i < last; i += 16) {
    if (i + 16 <= low || i >= high) {
      store(scores + i, set16(0.0f));
      continue;
    }
    const f32x16 w = exp(sub(load16(scores + i), set16(*maximum)));
    store(scores + i, w);
    sum = add(sum, w);
  }
  *total = reduce_add(sum);
}

// (m, l, o) of keys so far joined with those of the next chunk; both sides relative to their own maximum.
inline void merge_chunk(float* m, float* l, float* o, float next_m, float next_l, const float* next_o, int width) {
  const float joined = *m > next_m ? *m : next_m;
  const float keep = exp_scalar(*m - joined), take = exp_scalar(next_m - joined);
  *l = *l * keep + next_l * take;
  *m = joined;
  for (int i = 0; i < width; i += 16) store(o + i, fma(load16(next_o + i), set16(take), mul(load16(o + i), set16(keep))));
}

// Chunks [chunk0, chunk1) of the keys of one sequence, for `num_tokens` queries of one KV head.
// With `partial` null the result goes to `out`; else each chunk's (m, l, o) goes to partial[chunk - chunk0].
inline void attend(const AttentionShape& s, const KVLayer& kv, const int32_t* block_table, const float* q, size_t q_stride,
                   int first_position, int num_tokens, int kv_head, int chunk0, int chunk1, AttentionScratch& scratch,
                   float* out, size_t out_stride, float* partial) {
  const int group = s.num_heads / s.num_kv_heads, rows = num_tokens * group, d = s.head_dim, width = round_up(d, 16);
  const float* queries[MAX_ATTENTION_ROWS];
  for (int r = 0; r < rows; r++)
    queries[r] = q + static_cast<size_t>(r / group) * q_stride + static_cast<size_t>((kv_head * group + r % group) * d);
  const int last_position = first_position + num_tokens - 1;
  const auto window_start = [&](int position) { return s.window > 0 && position >= s.window ? position - s.window + 1 : 0; };
  bool started[MAX_ATTENTION_ROWS] = {};

  for (int chunk = chunk0; chunk < chunk1; chunk++) {
    const int key0 = chunk * KEY_CHUNK;
    int low = window_start(first_position) - key0, high = last_position + 1 - key0;
    low = low < 0 ? 0 : low / 16 * 16;
    high = high > KEY_CHUNK ? KEY_CHUNK : high;
    const uint16_t* keys[KEY_CHUNK / 16];
    const uint16_t* values[KEY_CHUNK / 16];
    int num_runs = 0;
    for (int i = low; i < high; i += 16, num_runs++) {
      const int position = key0 + i, offset = position % s.block_size;
      const uint16_t* block = kv.base + static_cast<size_t>(block_table[position / s.block_size]) * kv.block_stride;
      keys[num_runs] = block + s.head_values() * static_cast<size_t>(2 * kv_head) + static_cast<size_t>(offset) * d;
      values[num_runs] = keys[num_runs] + s.head_values();
    }
    // Few queries wait for memory: ask for the values while keys are scored, and for the next keys after that.
    const bool prefetches = rows <= MAX_QUERY_ROWS;
    const size_t run_bytes = size_t{32} * static_cast<size_t>(d);
    for (int b = 0; b < num_runs && prefetches; b++) prefetch(values[b], run_bytes);
    for (int r = 0; r < rows; r += MAX_QUERY_ROWS)
      score_rows<>(rows - r < MAX_QUERY_ROWS ? rows - r : MAX_QUERY_ROWS, queries + r, keys, num_runs, d, scratch.scores + KEY_CHUNK * r + low);
    float chunk_m[MAX_ATTENTION_ROWS], chunk_l[MAX_ATTENTION_ROWS];
    bool seen[MAX_ATTENTION_ROWS];
    for (int r = 0; r < rows; r++) {
      const int position = first_position + r / group;
      int from = window_start(position) - key0, to = position + 1 - key0;
      from = from < 0 ? 0 : from;
      to = to > KEY_CHUNK ? KEY_CHUNK : to;
      seen[r] = from < to;
      chunk_m[r] = chunk_l[r] = 0.0f;
      if (seen[r]) chunk_softmax(scratch.scores + KEY_CHUNK * r, low, round_up(high, 16), from, to, s.scale, s.softcap, &chunk_m[r], &chunk_l[r]);
      else for (int i = low; i < high; i += 16) store(scratch.scores + KEY_CHUNK * r + i, set16(0.0f));
    }
    for (int position = key0 + KEY_CHUNK; prefetches && chunk + 1 < chunk1 && position <= last_position && position < key0 + 2 * KEY_CHUNK; position += 16)
      prefetch(kv.base + static_cast<size_t>(block_table[position / s.block_size]) * kv.block_stride +
                   s.head_values() * static_cast<size_t>(2 * kv_head) + static_cast<size_t>(position % s.block_size) * d,
               run_bytes);
    std::memset(scratch.chunk_out, 0, static_cast<size_t>(rows * width) * 4);
    for (int r = 0; r < rows; r += MAX_QUERY_ROWS) {
      const int n = rows - r < MAX_QUERY_ROWS ? rows - r : MAX_QUERY_ROWS;
      for (int i = low, b = 0; i < high; i += 16, b++)
        value_rows<>(n, scratch.scores + KEY_CHUNK * r + i, values[b], d, high - i < 16 ? high - i : 16,
                     scratch.chunk_out + static_cast<size_t>(r * width), static_cast<size_t>(width));
    }
    for (int r = 0; r < rows; r++) {
      const float* chunk_out = scratch.chunk_out + static_cast<size_t>(r * width);
      float* o = scratch.out + static_cast<size_t>(r * width);
      if (partial) {
        float* p = partial + (static_cast<size_t>(chunk - chunk0) * static_cast<size_t>(rows) + static_cast<size_t>(r)) * static_cast<size_t>(width + 16);
        p[0] = chunk_m[r];
        p[1] = chunk_l[r];
        std::memcpy(p + 16, chunk_out, static_cast<size_t>(width) * 4);
      } else if (seen[r] && !started[r]) {
        started[r] = true;
        scratch.maximum[r] = chunk_m[r];
        scratch.total[r] = chunk_l[r];
        std::memcpy(o, chunk_out, static_cast<size_t>(width) * 4);
      } else if (seen[r]) {
        merge_chunk(&scratch.maximum[r], &scratch.total[r], o, chunk_m[r], chunk_l[r], chunk_out, width);
      }
    }
  }
  if (partial) return;
  for (int r = 0; r < rows; r++) {
    const float* o = scratch.out + static_cast<size_t>(r * width);
    float* to = out + static_cast<size_t>(r / group) * out_stride + static_cast<size_t>((kv_head * group + r % group) * d);
    const f32x16 inverse = set16(1.0f / scratch.total[r]);
    for (int i = 0; i < d; i += 16) {
      if (d - i >= 16) store(to + i, mul(load16(o + i), inverse));
      else store_first(to + i, mul(load16(o + i), inverse), d - i);
    }
  }
}

// Joins the chunks of one query token that `attend` left in `partial`: [chunk][group row][16 + width].
inline void merge_partial(const AttentionShape& s, const float* partial, int num_chunks, int kv_head, float* out) {
  const int group = s.num_heads / s.num_kv_heads, d = s.head_dim, width = round_up(d, 16);
  const size_t row = static_cast<size_t>(width + 16), chunk_stride = row * static_cast<size_t>(group);
  alignas(64) float o[MAX_HEAD_DIM];
  for (int r = 0; r < group; r++) {
    const float* p = partial + row * static_cast<size_t>(r);
    float m = p[0], l = p[1];
    std::memcpy(o, p + 16, static_cast<size_t>(width) * 4);
    for (int c = 1; c < num_chunks; c++) {
      const float* next = p + chunk_stride * static_cast<size_t>(c);
      merge_chunk(&m, &l, o, next[0], next[1], next + 16, width);
    }
    float* to = out + static_cast<size_t>((kv_head * group + r) * d);
    const f32x16 inverse = set16(1.0f / l);
    for (int i = 0; i < d; i += 16) {
      if (d - i >= 16) store(to + i, mul(load16(o + i), inverse));
      else store_first(to + i, mul(load16(o + i), inverse), d - i);
    }
  }
}

}  // namespace PAGODA_ISA
}  // namespace pagoda
