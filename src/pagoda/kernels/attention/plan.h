// How the attention of a step is cut into tasks, and where parts of results lie until they are merged.
//
// Tokens of one request that follow one another make a tile. Requests whose block tables begin with the same blocks
// share the chunks of keys that lie in them: those are read once for a tile of tokens of several requests (cascade
// attention). Neither changes a result: chunks of keys are joined in the order of their positions.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../common/batch_view.h"
#include "../common/tensors.h"
#include "shape.h"

namespace pagoda {

struct AttentionTask {
  int request;         // whose block table is read
  size_t first_token;  // in AttentionPlan::tokens
  int num_tokens, kv_head, chunk0, chunk1;
  AttentionOutput output;
};

// Whether requests read the keys and values of a common prefix together. Results are the same.
enum class PrefixSharing { Never, WhereItPays, Always };

// The parts of a token's result for one KV head: its first chunks joined, then single chunks.
struct TokenParts {
  int num_parts = 0;   // 0: one task writes the result
  int joined_end = 0;  // the chunk after the first part
  size_t offset = 0;   // of the parts of KV head 0 in the memory of partial results, in floats
};

// Layers of the same span and shape share a plan.
class AttentionPlan {
 public:
  AttentionPlan(int group, const AttentionShape& shape) : group_(group), shape_(shape) {}

  bool fits(int group, const AttentionShape& shape) const {
    return group == group_ && shape.window == shape_.window && shape.num_heads == shape_.num_heads;
  }
  // `row_block` rows that follow one another belong to one thread, see Model.
  void make(const BatchView& batch, int num_threads, int row_block, PrefixSharing sharing);

  const std::vector<AttentionTask>& tasks(int thread) const { return tasks_[static_cast<size_t>(thread)]; }
  const int* tokens(const AttentionTask& task) const { return tokens_.data() + task.first_token; }
  const TokenParts& parts_of(int token) const { return parts_of_token_[static_cast<size_t>(token)]; }
  size_t part_size() const { return PartialChunk(group_size(), round_up(shape_.head_dim, 16)).size(); }
  // Where a task puts the part, or the parts, of a token's result.
  size_t part_offset(const AttentionTask& task, int token) const;
  int num_shared_tiles() const { return static_cast<int>(shared_tiles_.size()); }
  // Floats that all parts take.
  size_t partial_size() const { return partial_size_; }

 private:
  struct Tile {
    int request, token, num_tokens;
    int chunk0, chunk1;  // that its tokens see
    int shared_end;      // the chunk after those that it shares with other tiles
  };
  struct SharedTile {
    int request;
    size_t first_token;
    int num_tokens, chunk0, chunk1;
  };
  // A tile that may share chunks [0, num_chunks), and how many of them it has in common with the one before it.
  struct Candidate {
    size_t tile;
    const int32_t* blocks;
    int num_chunks, num_common;
  };

  void cut_into_tiles(const BatchView& batch);
  void find_shared_chunks(const BatchView& batch);
  void share(size_t first, size_t last, int depth);
  bool pays(size_t num_tiles, int num_chunks) const;
  void add_shared_tiles(size_t first, size_t last, int chunk0, int chunk1);
  void add_tasks(int num_threads, int row_block, int chunks_per_task);
  void add_task(int thread, AttentionTask task);
  int group_size() const { return shape_.num_heads / shape_.num_kv_heads; }
  int max_tile_tokens() const { return std::max(1, std::min(16, MAX_ATTENTION_ROWS / group_size())); }

  int group_;
  AttentionShape shape_;
  PrefixSharing sharing_ = PrefixSharing::WhereItPays;
  size_t tokens_in_step_ = 0;
  std::vector<int> tokens_;  // all of the step in order, then those of shared tiles
  std::vector<Tile> tiles_;
  std::vector<SharedTile> shared_tiles_;
  std::vector<Candidate> candidates_;  // in the order of their block tables
  std::vector<std::vector<AttentionTask>> tasks_;  // of each thread
  std::vector<TokenParts> parts_of_token_;
  size_t partial_size_ = 0;
};

}  // namespace pagoda
