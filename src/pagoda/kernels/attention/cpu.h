// Attention over a paged KV cache, flash-style: keys in chunks at absolute positions, a softmax for each chunk,
// and chunks merged in order (Dao et al. 2022). What a query computes depends only on its position, never on
// the queries beside it, on how the prompt was cut into steps or on how a long context is split over threads.
//
// Both products are dot products of pairs of int16, which run at twice the rate of float ones: each key, value
// and query of a head is rounded to 13 bits of its largest component, probabilities (times the scales of their
// values) to 12 bits of the chunk's largest. Sums of 64 products are exact.
//
// A block of a layer holds for each KV head
//   keys    [run of 16 tokens][head_dim / 2][16 tokens][2]   so that 16 scores are one vector
//   values  [block_size / 2][head_dim][2 tokens]
//   scales  of keys [block_size], of values [block_size]      float
#pragma once
#include "../activation/cpu.h"
#include "../common/simd.h"
#include "../common/tensors.h"
#include "shape.h"

namespace pagoda {
namespace PAGODA_ISA {

constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int larger(int a, int b) { return a > b ? a : b; }

// Rounds n values, a multiple of 2, to integers of at most MAX_INT and returns what one of them is worth.
inline float to_fixed_point(const float* x, int n, int16_t* out) {
  const f32x16 highest = set16(3e38f), lowest = set16(-3e38f);  // an infinity would make the rest NaN
  alignas(64) float clamped[MAX_HEAD_DIM];
  f32x16 largest = set16(0.0f);
  for (int i = 0; i < n; i += 16) {
    const f32x16 v = min(max(n - i >= 16 ? load16(x + i) : load_first(x + i, n - i), lowest), highest);
    store(clamped + i, v);
    largest = max(largest, abs(v));
  }
  const float most = reduce_max(largest);
  const f32x16 inverse = set16(most > 1e-30f ? MAX_INT / most : 0.0f);
  for (int i = 0; i < n; i += 16) {
    int16_t rounded[16];
    store_i16(rounded, to_int(mul(load16(clamped + i), inverse)));
    std::memcpy(out + i, rounded, 2 * static_cast<size_t>(n - i < 16 ? n - i : 16));
  }
  return most > 1e-30f ? most / MAX_INT : 0.0f;
}

inline void write_kv(const AttentionShape& s, const KVLayer& kv, int slot, const float* key, const float* value) {
  int16_t* block = kv.base + static_cast<size_t>(slot / s.block_size) * kv.block_stride;
  const int offset = slot % s.block_size, run = offset / 16, lane = offset % 16, d = s.head_dim;
  int16_t rounded[MAX_HEAD_DIM];
  for (int h = 0; h < s.num_kv_heads; h++, block += s.head_size(), key += d, value += d) {
    auto* scales = reinterpret_cast<float*>(block + 2 * s.head_values());
    scales[offset] = to_fixed_point(key, d, rounded);
    int16_t* k = block + static_cast<size_t>(run) * 16 * static_cast<size_t>(d) + 2 * lane;
    for (int i = 0; i < d; i += 2) std::memcpy(k + 16 * i, rounded + i, 4);
    scales[s.block_size + offset] = to_fixed_point(value, d, rounded);
    int16_t* v = block + s.head_values() + static_cast<size_t>(offset / 2 * 2 * d + offset % 2);
    for (int i = 0; i < d; i++) v[2 * i] = rounded[i];
  }
}

// What attention reads of a run of 16 tokens of one KV head.
struct Run {
  const int16_t *keys, *values;
  const float *key_scales, *value_scales;
  const int16_t* next_keys;  // of the same run in the next chunk, or some that are in a cache
};

// Loops over the sums of a tile, unrolled by the front end: only then do compilers keep all of them in registers.
// Index b counts runs of 16 keys, or of 16 columns, in parts.
#define PAGODA_EACH(index, count, ...) repeat<(count)>([&](auto index) __attribute__((always_inline)) { __VA_ARGS__; })
#define PAGODA_EACH_ROW(...) PAGODA_EACH(r, R, __VA_ARGS__)
#define PAGODA_EACH_PART(...) PAGODA_EACH(b, B * NUM_PARTS, __VA_ARGS__)

// scores[r][16 b ..] = q[r] . keys of run b, for R queries and B runs of 16 keys. Meanwhile it asks for the values of
// these runs, as `value_tile` does for the next keys: line by line, since a burst would stall the core.
template <int R, int B>
inline void score_tile(const int16_t* q, const float* q_scale, const Run* runs, int head_dim, float* scores) {
  for (int first = 0; first < head_dim; first += DOT_LENGTH) {
    const int last = head_dim - first < DOT_LENGTH ? head_dim : first + DOT_LENGTH;
    ipart acc[R][B * NUM_PARTS];
    PAGODA_EACH_ROW(PAGODA_EACH_PART(acc[r][b] = iset(0)));
    for (int d = first; d < last; d += 2) {
      ipart k[B * NUM_PARTS];
      PAGODA_EACH_PART(k[b] = load_ints(runs[b / NUM_PARTS].keys + 16 * d + b % NUM_PARTS * 2 * PART));
      PAGODA_EACH(b, B, __builtin_prefetch(runs[b].values + 16 * d, 0, 2));
      PAGODA_EACH_ROW(const ipart x = pair(q + r * head_dim + d); PAGODA_EACH_PART(acc[r][b] = dot2(acc[r][b], k[b], x)));
    }
    PAGODA_EACH_PART(
      const fpart scale = load(runs[b / NUM_PARTS].key_scales + b % NUM_PARTS * PART);
      PAGODA_EACH_ROW(
        float* s = scores + KEY_CHUNK * r + PART * b;
        const fpart sum = mul(to_float(acc[r][b]), mul(scale, set(q_scale[r])));
        store(s, first == 0 ? sum : add(load(s), sum))));
  }
}

// out[r][16 c ..] += sum over the tokens of `num_runs` runs of weights[r][t] * values[t][16 c ..], in integers,
// for R queries and B runs of 16 columns, or one run of fewer columns.
template <int R, int B, bool FULL>
inline void value_tile(const int16_t* weights, const Run* runs, int num_runs, int column, int head_dim, bool first, float* out, size_t out_stride) {
  ipart acc[R][B * NUM_PARTS];
  PAGODA_EACH_ROW(PAGODA_EACH_PART(acc[r][b] = iset(0)));
  for (int run = 0; run < num_runs; run++) {
    const int16_t* values = runs[run].values + 2 * column;
    const auto to_next = runs[run].next_keys - runs[run].values;
    for (int t = 0; t < 16; t += 2, values += 2 * head_dim) {
      ipart v[B * NUM_PARTS];
      PAGODA_EACH_PART(v[b] = FULL ? load_ints(values + 2 * PART * b) : load_ints_first(values + 2 * PART * b, head_dim - column - PART * b));
      PAGODA_EACH(b, B, __builtin_prefetch(values + 32 * b + to_next, 0, 2));
      PAGODA_EACH_ROW(const ipart w = pair(weights + KEY_CHUNK * r + 16 * run + t); PAGODA_EACH_PART(acc[r][b] = dot2(acc[r][b], v[b], w)));
    }
  }
  PAGODA_EACH_ROW(PAGODA_EACH_PART(
    float* o = out + static_cast<size_t>(r) * out_stride + PART * b;
    store(o, first ? to_float(acc[r][b]) : add(load(o), to_float(acc[r][b])))));
}

#undef PAGODA_EACH
#undef PAGODA_EACH_ROW
#undef PAGODA_EACH_PART

#if defined(PAGODA_ISA_AVX512)
constexpr int MAX_QUERY_ROWS = 12;
#elif defined(__AVX2__)
constexpr int MAX_QUERY_ROWS = 6;
#elif defined(PAGODA_ISA_NEON)
constexpr int MAX_QUERY_ROWS = 4;
#else
constexpr int MAX_QUERY_ROWS = 2;
#endif

// Registers left by R queries go to more runs of keys or columns: sums stay independent, and what was broadcast
// for a query is used more than once.
constexpr int runs_for(int rows) {
  return NUM_PARTS == 1 && MAX_QUERY_ROWS > 2 ? (rows == 1 ? 8 : rows <= 3 ? 4 : rows <= 6 ? 2 : 1) : rows == 1 ? 4 : rows <= MAX_QUERY_ROWS / 2 ? 2 : 1;
}

template <int R = MAX_QUERY_ROWS>
inline void score_rows(int rows, const int16_t* q, const float* q_scale, const Run* runs, int num_runs, int head_dim, float* scores) {
  if constexpr (R > 1) if (rows < R) return score_rows<R - 1>(rows, q, q_scale, runs, num_runs, head_dim, scores);
  constexpr int B = runs_for(R);
  int b = 0;
  for (; b + B <= num_runs; b += B) score_tile<R, B>(q, q_scale, runs + b, head_dim, scores + 16 * b);
  if constexpr (B > 1) for (; b < num_runs; b++) score_tile<R, 1>(q, q_scale, runs + b, head_dim, scores + 16 * b);
}

template <int R = MAX_QUERY_ROWS>
inline void value_rows(int rows, const int16_t* weights, const Run* runs, int num_runs, int head_dim, bool first, float* out, size_t out_stride) {
  if constexpr (R > 1) if (rows < R) return value_rows<R - 1>(rows, weights, runs, num_runs, head_dim, first, out, out_stride);
  constexpr int C = runs_for(R);
  int d = 0;
  for (; d + 16 * C <= head_dim; d += 16 * C) value_tile<R, C, true>(weights, runs, num_runs, d, head_dim, first, out + d, out_stride);
  if constexpr (C > 1) for (; d + 16 <= head_dim; d += 16) value_tile<R, 1, true>(weights, runs, num_runs, d, head_dim, first, out + d, out_stride);
  if (d < head_dim) value_tile<R, 1, false>(weights, runs, num_runs, d, head_dim, first, out + d, out_stride);
}

// Softmax of one row of a chunk, relative to the chunk: scores are in units of log 2, of `num_runs` runs of keys from
// `first` on, of which the row sees [low, high). `weights` are the probabilities times the scales of their values, in
// units of the result; `total` is the sum of the probabilities, by lane. A row that sees all of a whole chunk
// needs no masks.
template <bool WHOLE>
inline float chunk_softmax(const float* scores, const Run* runs, int num_runs, int first, int low, int high, int16_t* weights, float* maximum,
                           float* total) {
  constexpr int RUNS = KEY_CHUNK / 16;
  const int n = WHOLE ? RUNS : num_runs;
  f32x16 s[RUNS], largest = set16(-1e30f);
#pragma GCC unroll 8
  for (int b = 0; b < n; b++) {
    s[b] = load16(scores + 16 * b);
    if (!WHOLE) s[b] = keep_range(s[b], first + 16 * b, low, high, -1e38f);
    largest = max(largest, s[b]);
  }
  *maximum = reduce_max(largest);
  f32x16 sum = set16(0.0f), most = set16(0.0f);
#pragma GCC unroll 8
  for (int b = 0; b < n; b++) {
    f32x16 p = exp2_of_negative(sub(s[b], set16(*maximum))), scale = load16(runs[b].value_scales);
    if (!WHOLE) {
      p = keep_range(p, first + 16 * b, low, high, 0.0f);
      scale = keep_range(scale, first + 16 * b, low, high, 0.0f);
    }
    s[b] = mul(p, scale);
    sum = add(sum, p);
    most = max(most, s[b]);
  }
  store(total, sum);
  const float top = reduce_max(most);
  const f32x16 inverse = set16(top > 1e-30f ? MAX_INT / top : 0.0f);
#pragma GCC unroll 8
  for (int b = 0; b < n; b++) store_i16(weights + 16 * b, to_int(mul(s[b], inverse)));
  return top > 1e-30f ? top / MAX_INT : 0.0f;
}

// Scores in units of log 2 to the same, capped.
inline void softcap_scores(float* scores, int n, float cap) {
  for (int i = 0; i < n; i += 16)
    store(scores + i, mul(softcap(mul(load16(scores + i), set16(1.0f / LOG2_E)), cap), set16(LOG2_E)));
}

constexpr float NOTHING_SEEN = -1e38f;  // maximum over no keys

// The factors that put the softmax of keys so far and that of the next chunk over one maximum, for 16 rows.
// m, of the keys so far, becomes that of both.
PAGODA_INLINE void join_maxima(float* m, const float* next_m, float* keep, float* take) {
  const f32x16 a = load16(m), b = load16(next_m), joined = max(a, b);
  store(m, joined);
  store(keep, exp2_of_negative(sub(a, joined)));
  store(take, exp2_of_negative(sub(b, joined)));
}

// o = o * keep + next * take
PAGODA_INLINE void join_result(float* o, const float* next, float keep, float take, int width) {
  for (int i = 0; i < width; i += 16) store(o + i, fma(load16(next + i), set16(take), mul(load16(o + i), set16(keep))));
}

// to = o / the sum of `total`
PAGODA_INLINE void store_attention(const float* o, const float* total, int head_dim, float* to) {
  const f32x16 inverse = set16(1.0f / reduce_add(load16(total)));
  for (int i = 0; i < head_dim; i += 16) {
    if (head_dim - i >= 16) store(to + i, mul(load16(o + i), inverse));
    else store_first(to + i, mul(load16(o + i), inverse), head_dim - i);
  }
}

// Keeps one query head's row of a part.
PAGODA_INLINE void store_partial(const PartialChunk& layout, int head, float m, float unit, const float* total, const float* o, float* part) {
  const size_t h = static_cast<size_t>(head);
  part[h] = m;
  part[layout.units() + h] = unit;
  std::memcpy(part + layout.totals() + 16 * h, total, 16 * sizeof(float));
  std::memcpy(part + layout.results() + layout.width * h, o, layout.width * sizeof(float));
}

// The tile's chunks of the keys of one sequence, for its queries.
inline void attend(const AttentionShape& s, const KVLayer& kv, const AttentionTile& tile, AttentionScratch& scratch) {
  const int group = s.num_heads / s.num_kv_heads, rows = tile.num_tokens * group, d = s.head_dim, width = round_up(d, 16);
  const PartialChunk layout(group, width);
  const auto head_offset = [&](int r) { return static_cast<size_t>((tile.kv_head * group + r % group) * d); };
  for (int r = 0; r < rows; r++)
    scratch.query_scale[r] = s.scale * LOG2_E * to_fixed_point(tile.queries[r / group].q + head_offset(r), d, scratch.queries + r * d);
  const int first_position = tile.queries[0].position, last_position = tile.queries[tile.num_tokens - 1].position;
  const auto window_start = [&](int position) { return s.window > 0 && position >= s.window ? position - s.window + 1 : 0; };
  const auto run_at = [&](int position) {
    const int offset = position % s.block_size;
    const int16_t* head = kv.base + static_cast<size_t>(tile.block_table[position / s.block_size]) * kv.block_stride + s.head_size() * static_cast<size_t>(tile.kv_head);
    const auto* scales = reinterpret_cast<const float*>(head + 2 * s.head_values());
    const size_t values = static_cast<size_t>(offset) * static_cast<size_t>(d);
    return Run{head + values, head + s.head_values() + values, scales + offset, scales + s.block_size + offset, head + values};
  };
  for (int r = 0; r < MAX_ATTENTION_ROWS; r += 16) store(scratch.maximum + r, set16(NOTHING_SEEN));
  std::memset(scratch.total, 0, sizeof scratch.total);
  std::memset(scratch.out, 0, static_cast<size_t>(rows * width) * 4);

  for (int chunk = tile.chunk0; chunk < tile.chunk1; chunk++) {
    const int key0 = chunk * KEY_CHUNK;
    int low = window_start(first_position) - key0, high = last_position + 1 - key0;
    low = low < 0 ? 0 : low / 16 * 16;
    high = smaller(high, KEY_CHUNK);
    Run runs[KEY_CHUNK / 16];
    int num_runs = 0;
    for (int i = low; i < high; i += 16) runs[num_runs++] = run_at(key0 + i);
    for (int b = 0; b < num_runs && chunk + 1 < tile.chunk1; b++) {
      const int position = key0 + KEY_CHUNK + low + 16 * b;
      if (position <= last_position) runs[b].next_keys = run_at(position).keys;
    }
    for (int r = 0; r < rows; r += MAX_QUERY_ROWS)
      score_rows<>(smaller(rows - r, MAX_QUERY_ROWS), scratch.queries + r * d, scratch.query_scale + r, runs, num_runs, d,
                   scratch.scores + KEY_CHUNK * r + low);
    alignas(64) float chunk_m[MAX_ATTENTION_ROWS], unit[MAX_ATTENTION_ROWS] = {}, chunk_total[MAX_ATTENTION_ROWS][16];
    for (int r = 0; r < MAX_ATTENTION_ROWS; r += 16) store(chunk_m + r, set16(NOTHING_SEEN));
    for (int r = 0; r < rows; r++) {
      const int position = tile.queries[r / group].position;
      const int from = larger(window_start(position) - key0, 0), to = smaller(position + 1 - key0, KEY_CHUNK);
      float* scores = scratch.scores + KEY_CHUNK * r + low;
      int16_t* weights = scratch.weights + KEY_CHUNK * r + low;
      if (s.softcap > 0.0f) softcap_scores(scores, 16 * num_runs, s.softcap);
      if (from >= to) {
        std::memset(weights, 0, 2 * static_cast<size_t>(16 * num_runs));
        std::memset(chunk_total[r], 0, sizeof chunk_total[r]);
      } else {
        const bool whole = from == 0 && to == KEY_CHUNK && low == 0;
        unit[r] = whole ? chunk_softmax<true>(scores, runs, num_runs, low, from, to, weights, &chunk_m[r], chunk_total[r])
                        : chunk_softmax<false>(scores, runs, num_runs, low, from, to, weights, &chunk_m[r], chunk_total[r]);
      }
    }
    // Integer sums end at absolute multiples of DOT_LENGTH, so that they do not depend on where a window begins.
    bool first = true;
    for (int segment = 0; segment < KEY_CHUNK; segment += DOT_LENGTH) {
      const int begin = larger(segment, low), end = smaller(segment + DOT_LENGTH, high);
      if (begin >= end) continue;
      const int num = (end - begin + 15) / 16;
      for (int r = 0; r < rows; r += MAX_QUERY_ROWS)
        value_rows<>(smaller(rows - r, MAX_QUERY_ROWS), scratch.weights + KEY_CHUNK * r + begin, runs + (begin - low) / 16, num, d,
                     first, scratch.chunk_out + static_cast<size_t>(r * width), static_cast<size_t>(width));
      first = false;
    }
    if (tile.output == AttentionOutput::Chunks) {
      for (int r = 0; r < rows; r++)
        store_partial(layout, r % group, chunk_m[r], unit[r], chunk_total[r], scratch.chunk_out + r * width,
                      tile.queries[r / group].out + layout.size() * static_cast<size_t>(chunk - tile.chunk0));
      continue;
    }
    alignas(64) float keep[MAX_ATTENTION_ROWS], take[MAX_ATTENTION_ROWS];
    for (int r = 0; r < rows; r += 16) join_maxima(scratch.maximum + r, chunk_m + r, keep + r, take + r);
    for (int r = 0; r < rows; r++) join_result(scratch.total[r], chunk_total[r], keep[r], take[r], 16);
    for (int r = 0; r < rows; r++) join_result(scratch.out + r * width, scratch.chunk_out + r * width, keep[r], take[r] * unit[r], width);
  }
  for (int r = 0; r < rows; r++) {
    float* to = tile.queries[r / group].out;
    if (tile.output == AttentionOutput::Result) store_attention(scratch.out + r * width, scratch.total[r], d, to + head_offset(r));
    if (tile.output == AttentionOutput::Joined)
      store_partial(layout, r % group, scratch.maximum[r], 1.0f, scratch.total[r], scratch.out + r * width, to);
  }
}

// to[0 .. 16 * N) = the sum over chunks c of next * take[c][r], what was before each times keep[c][r].
template <int N>
PAGODA_INLINE void join_chunks(const float* next, size_t chunk_size, int num_chunks, const float (*keep)[16], const float (*take)[16], int r, float* to) {
  f32x16 sum[N];
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) sum[i] = load16(to + 16 * i);
  for (int c = 0; c < num_chunks; c++, next += chunk_size)
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) sum[i] = fma(load16(next + 16 * i), set16(take[c][r]), mul(sum[i], set16(keep[c][r])));
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) store(to + 16 * i, sum[i]);
}

// Joins the parts of one token and KV head, which `attend` left one after the other: the first one is where joining
// chunk by chunk would have got to. The same sums as `attend` makes itself, for all heads together.
inline void merge_partial(const AttentionShape& s, const float* parts, int num_parts, int kv_head, float* out) {
  constexpr int CHUNKS_AT_ONCE = 64, HEADS_AT_ONCE = 16;
  const int group = s.num_heads / s.num_kv_heads, d = s.head_dim, width = round_up(d, 16);
  const PartialChunk layout(group, width);
  alignas(64) float keep[CHUNKS_AT_ONCE][16], take[CHUNKS_AT_ONCE][16], take_unit[CHUNKS_AT_ONCE][16];
  alignas(64) float m[16], total[HEADS_AT_ONCE][16], o[HEADS_AT_ONCE][MAX_HEAD_DIM];
  for (int head = 0; head < group; head += HEADS_AT_ONCE) {
    const int num_heads = smaller(group - head, HEADS_AT_ONCE);
    store(m, load16(parts + head));
    for (int r = 0; r < num_heads; r++) {
      std::memcpy(total[r], parts + layout.totals() + 16 * (head + r), sizeof total[r]);
      std::memcpy(o[r], parts + layout.results() + width * (head + r), static_cast<size_t>(width) * 4);
    }
    for (int c0 = 1; c0 < num_parts; c0 += CHUNKS_AT_ONCE) {
      const int n = smaller(num_parts - c0, CHUNKS_AT_ONCE);
      const float* chunks = parts + layout.size() * static_cast<size_t>(c0);
      for (int c = 0; c < n; c++) {
        const float* chunk = chunks + layout.size() * static_cast<size_t>(c) + head;
        join_maxima(m, chunk, keep[c], take[c]);
        store(take_unit[c], mul(load16(take[c]), load16(chunk + layout.units())));
      }
      for (int r = 0; r < num_heads; r++) {
        join_chunks<1>(chunks + layout.totals() + 16 * (head + r), layout.size(), n, keep, take, r, total[r]);
        const float* results = chunks + layout.results() + width * (head + r);
        int i = 0;
        for (; i + 64 <= width; i += 64) join_chunks<4>(results + i, layout.size(), n, keep, take_unit, r, o[r] + i);
        for (; i < width; i += 16) join_chunks<1>(results + i, layout.size(), n, keep, take_unit, r, o[r] + i);
      }
    }
    for (int r = 0; r < num_heads; r++) store_attention(o[r], total[r], d, out + static_cast<size_t>((kv_head * group + head + r) * d));
  }
}

}  // namespace PAGODA_ISA
}  // namespace pagoda
