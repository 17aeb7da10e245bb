#include "plan.h"

#include <algorithm>
#include <limits>

#include "../common/tasks.h"

namespace pagoda {
namespace {

// Of sharing prefixes. With four query heads a KV head a token by itself multiplies as fast as many tokens do.
constexpr int MIN_BUSY_ROWS = 4;
constexpr size_t MIN_CHUNKS_SAVED = 2;  // by each tile, on average

int first_chunk(const AttentionShape& shape, int position) {
  return shape.window > 0 && position >= shape.window ? (position - shape.window + 1) / KEY_CHUNK : 0;
}

}  // namespace

void AttentionPlan::make(const BatchView& batch, int num_threads, int row_block, PrefixSharing sharing) {
  sharing_ = sharing;
  cut_into_tiles(batch);
  find_shared_chunks(batch);
  long num_chunks = 0;
  for (const Tile& tile : tiles_) num_chunks += tile.chunk1 - tile.shared_end;
  for (const SharedTile& tile : shared_tiles_) num_chunks += tile.chunk1 - tile.chunk0;
  const long chunks_per_task = num_chunks * shape_.num_kv_heads / (num_threads * TASKS_PER_THREAD);
  add_tasks(num_threads, row_block, static_cast<int>(std::max(1L, chunks_per_task)));
}

// A tile holds as many tokens of a request as fit MAX_ATTENTION_ROWS.
void AttentionPlan::cut_into_tiles(const BatchView& batch) {
  const int most = max_tile_tokens();
  tiles_.clear();
  tokens_in_step_ = at(batch.num_tokens);
  tokens_.resize(tokens_in_step_);
  for (int t = 0; t < batch.num_tokens; t++) tokens_[at(t)] = t;
  for (int r = 0; r < batch.num_requests; r++) {
    const int begin = batch.query_start_loc[r], end = batch.query_start_loc[r + 1], start = batch.seq_lens[r] - (end - begin);
    for (int token = begin; token < end; token += most) {
      const int n = std::min(most, end - token), first = start + token - begin, chunk0 = first_chunk(shape_, first);
      tiles_.push_back({r, token, n, chunk0, (first + n - 1) / KEY_CHUNK + 1, chunk0});
    }
  }
}

// Tiles that leave room for others, and whose tokens see all that lies before them, in the order of their block
// tables: those that have a prefix in common are neighbours then.
void AttentionPlan::find_shared_chunks(const BatchView& batch) {
  candidates_.clear();
  shared_tiles_.clear();
  if (sharing_ == PrefixSharing::Never || (sharing_ == PrefixSharing::WhereItPays && group_size() >= MIN_BUSY_ROWS)) return;
  for (size_t i = 0; i < tiles_.size(); i++) {
    const Tile& tile = tiles_[i];
    const int position = batch.positions[tile.token], num_chunks = position / KEY_CHUNK;
    const bool sees_all = shape_.window == 0 || position + tile.num_tokens <= shape_.window;
    if (num_chunks > 0 && sees_all && 2 * tile.num_tokens <= max_tile_tokens())
      candidates_.push_back({i, batch.block_table(group_, tile.request), num_chunks, 0});
  }
  const auto num_blocks = [&](const Candidate& c) { return ceil_div(c.num_chunks * KEY_CHUNK, shape_.block_size); };
  std::sort(candidates_.begin(), candidates_.end(), [&](const Candidate& a, const Candidate& b) {
    return std::lexicographical_compare(a.blocks, a.blocks + num_blocks(a), b.blocks, b.blocks + num_blocks(b));
  });
  for (size_t i = 1; i < candidates_.size(); i++) {
    Candidate &a = candidates_[i - 1], &b = candidates_[i];
    const int n = std::min(num_blocks(a), num_blocks(b));
    const auto num_equal = static_cast<int>(std::mismatch(a.blocks, a.blocks + n, b.blocks).first - a.blocks);
    b.num_common = std::min({num_equal * shape_.block_size / KEY_CHUNK, a.num_chunks, b.num_chunks});
  }
  share(0, candidates_.size(), 0);
}

// Shares what candidates [first, last) have in common beyond chunk `depth`, then what some of them do beyond that.
void AttentionPlan::share(size_t first, size_t last, int depth) {
  if (last - first < 2) return;
  int common = candidates_[first + 1].num_common;
  for (size_t i = first + 2; i < last; i++) common = std::min(common, candidates_[i].num_common);
  if (common > depth && pays(last - first, common - depth)) {
    add_shared_tiles(first, last, depth, common);
    depth = common;
  }
  for (size_t begin = first, i = first + 1; i <= last; i++) {
    if (i < last && candidates_[i].num_common > common) continue;
    share(begin, i, depth);
    begin = i;
  }
}

// Whether reading chunks once is worth the parts that have to be written and merged.
bool AttentionPlan::pays(size_t num_tiles, int num_chunks) const {
  return sharing_ == PrefixSharing::Always || (num_tiles - 1) * at(num_chunks) > MIN_CHUNKS_SAVED * num_tiles;
}

void AttentionPlan::add_shared_tiles(size_t first, size_t last, int chunk0, int chunk1) {
  const int most = MAX_ATTENTION_ROWS / group_size();
  int num_tokens = 0;
  for (size_t i = first; i < last; i++) {
    Tile& tile = tiles_[candidates_[i].tile];
    tile.shared_end = chunk1;
    if (num_tokens == 0 || num_tokens + tile.num_tokens > most) {
      shared_tiles_.push_back({tile.request, tokens_.size(), 0, chunk0, chunk1});
      num_tokens = 0;
    }
    for (int t = 0; t < tile.num_tokens; t++) tokens_.push_back(tile.token + t);
    num_tokens = shared_tiles_.back().num_tokens += tile.num_tokens;
  }
}

// A tile with a long context is split over chunks when there are too few tasks to keep the threads busy. Shared
// tiles come first: what is left to even threads out is small then.
void AttentionPlan::add_tasks(int num_threads, int row_block, int chunks_per_task) {
  tasks_.assign(at(num_threads), {});
  parts_of_token_.assign(tokens_in_step_, {});
  partial_size_ = 0;
  if (num_threads == 1) chunks_per_task = std::numeric_limits<int>::max() / 2;
  int turn = 0;  // of threads
  for (const SharedTile& tile : shared_tiles_) {
    if (tile.chunk0 == 0)
      for (int i = 0; i < tile.num_tokens; i++)
        parts_of_token_[at(tokens_[tile.first_token + at(i)])].joined_end = std::min(chunks_per_task, tile.chunk1);
    for (int h = 0; h < shape_.num_kv_heads; h++)
      for (int c = tile.chunk0; c < tile.chunk1; c += chunks_per_task)
        add_task(turn++ % num_threads, {tile.request, tile.first_token, tile.num_tokens, h, c, std::min(c + chunks_per_task, tile.chunk1), {}});
  }
  for (const Tile& tile : tiles_) {
    const bool is_split = num_threads > 1 && tile.chunk1 - tile.shared_end > chunks_per_task;
    const int step = is_split ? chunks_per_task : tile.chunk1 - tile.shared_end;
    for (int token = tile.token; token < tile.token + tile.num_tokens; token++) {
      TokenParts& parts = parts_of_token_[at(token)];
      if (is_split && tile.shared_end == tile.chunk0) parts.joined_end = tile.chunk0 + step;
      if (parts.joined_end == 0) continue;
      parts.num_parts = 1 + tile.chunk1 - parts.joined_end;
      parts.offset = partial_size_;
      partial_size_ += part_size() * at(parts.num_parts * shape_.num_kv_heads);
    }
    for (int h = 0; h < shape_.num_kv_heads; h++)
      for (int c = tile.shared_end; c < tile.chunk1; c += step)
        add_task(is_split ? turn++ % num_threads : tile.token / row_block % num_threads,
                 {tile.request, at(tile.token), tile.num_tokens, h, c, std::min(c + step, tile.chunk1), {}});
  }
}

void AttentionPlan::add_task(int thread, AttentionTask task) {
  const int joined_end = parts_of(tokens(task)[0]).joined_end;
  task.output = joined_end == 0 ? AttentionOutput::Result : task.chunk0 < joined_end ? AttentionOutput::Joined : AttentionOutput::Chunks;
  tasks_[at(thread)].push_back(task);
}

size_t AttentionPlan::part_offset(const AttentionTask& task, int token) const {
  const TokenParts& parts = parts_of(token);
  const int part = task.output == AttentionOutput::Joined ? 0 : 1 + task.chunk0 - parts.joined_end;
  return parts.offset + part_size() * at(task.kv_head * parts.num_parts + part);
}

}  // namespace pagoda
