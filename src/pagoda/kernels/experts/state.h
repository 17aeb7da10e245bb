// Routed experts of a step: rows of activations put in the order of their experts, so that each expert's weights
// are read once and meet all its rows. Layers run one after the other and share this memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pagoda {

struct ExpertsOp {
  int x, router, out;                  // buffers
  std::vector<int> gates, ups, downs;  // weights, an expert each
  int width, ffn_size, num_active;
  bool normalised;
};

// Phases between which all threads wait.
enum class ExpertsPhase { Group, Gather, GateUp, Activate, Down };

struct ExpertsRows {
  std::vector<int32_t> expert;     // [tokens, active] largest weight first
  std::vector<float> weight;       // [tokens, active]
  std::vector<int32_t> row;        // [tokens, active] where the token's row for that expert lies
  std::vector<int32_t> token;      // [rows] the other way round
  std::vector<int32_t> used;       // experts that have rows
  std::vector<int32_t> first_row;  // [used + 1]
  std::vector<int32_t> next_row;   // [experts + 1] while rows are counted
  size_t quant_capacity = 0;       // rows that the quantised images of x and gate have room for
  std::vector<float> x, gate, up;  // [rows, width], [rows, ffn_size] twice; results take the place of x
};

}  // namespace pagoda
