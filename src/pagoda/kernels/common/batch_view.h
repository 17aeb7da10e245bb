#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pagoda {

// The arrays of one step; see runtime/forward_batch.py.
struct BatchView {
  int num_tokens, num_requests, num_logits_rows;
  const int32_t *token_ids, *positions, *query_start_loc, *seq_lens, *logits_rows;
  std::vector<const int32_t*> block_tables, slot_mapping;  // by layer group
  std::vector<size_t> block_table_strides;

  const int32_t* block_table(int group, int request) const {
    const size_t g = static_cast<size_t>(group);
    return block_tables[g] + block_table_strides[g] * static_cast<size_t>(request);
  }
};

}  // namespace pagoda
