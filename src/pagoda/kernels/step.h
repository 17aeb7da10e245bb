// A model as stages that all threads run together: one native call a step, a barrier only between stages.
//
//   row stage        ops on single rows, one after the other, for a range of rows (norm, quantise, rope, ...)
//   linear stage     matrix products that do not depend on each other (q, k and v; gate and up)
//   attention stage  one tile of queries of one KV head, or a few key chunks of one query, a task
//   experts stages   products of the rows of each expert that is used (experts/stages.cpp)
//
// Many rows are shared out in blocks: up to the next attention or experts, where rows meet, a thread
// takes a block through all stages while its activations lie in the caches of its core. Few rows are worked on
// together: each stage is cut into tasks. Both blocks and tasks have an owner, so that a thread reads the weights
// and rows that it read and wrote before; a thread that has none left takes those of others. Which thread does
// what never changes a result.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "arena.h"
#include "attention/plan.h"
#include "common/batch_view.h"
#include "common/kernel_table.h"
#include "common/thread_pool.h"
#include "experts/state.h"

namespace pagoda {

struct RowOp {
  enum Kind { Embed, Norm, Angles, Rope, WriteKV, Gated, Add, Quantize, Gather, Softcap, MergeAttention, LayerNorm, AddPosition, Scale, Gelu, Route,
              CombineExperts } kind;
  int a = -1, b = -1, out = -1;  // buffers; `b` is the table of angles of Angles and Rope, the vector of biases of LayerNorm
  int weight = -1;               // vector or packed weight
  int layer = -1;                // WriteKV, MergeAttention; Route, CombineExperts: the experts
  int width = 0;                 // Norm: run of columns; Rope: head dim
  float value = 0.0f;            // norms: eps; Embed, Scale: factor; Softcap: cap
  bool gelu = false;
};

struct LinearOp {
  int x, quant, out, weight, bias, residual;  // buffers and weights; -1: none. `quant` for quantised weights
};

struct AttentionOp {
  int q, out, layer;
};

struct Stage {
  enum Kind { Row, Linear, Attention, Experts } kind;
  bool on_logits_rows = false;
  std::vector<RowOp> row_ops;
  std::vector<LinearOp> linear_ops;
  AttentionOp attention{};
  int experts = -1;
  ExpertsPhase phase{};
  int num_tasks = 0;  // of an experts stage in the current step
  int num_panels = 0;
  int num_rows = 0, rows_per_task = 1, panels_per_task = 1;  // of the current step
};

struct LayerSpec {
  int group, index_in_group;
  AttentionShape shape;
};

class Model {
 public:
  Model(const Kernels* kernels, int num_threads);

  int add_weight(int file_type, const uint8_t* data, size_t row_bytes, int rows, int cols);
  int add_vector(const float* data, int size);
  int add_buffer(int width);                       // float rows
  int add_quant_buffer(int width);                 // rows of quantised activations
  int add_angles(const double* inv_freq, int half, float factor);
  int add_group(int num_layers, int num_kv_heads, int head_dim, int num_blocks, int block_size);
  int add_layer(int group, int index_in_group, int num_heads, float scale, float softcap, int window);

  void add_row_op(const RowOp& op, bool on_logits_rows);
  void add_linear(const LinearOp& op, bool on_logits_rows);
  void add_attention(const AttentionOp& op);
  void add_experts(ExpertsOp op);
  void set_logits(int buffer) { logits_buffer_ = buffer; }

  // Runs a step and returns logits [num_logits_rows] rows of `logits_stride()` floats, valid until the next call.
  const float* forward(const BatchView& batch);
  size_t logits_stride() const { return buffers_[static_cast<size_t>(logits_buffer_)].stride; }
  int logits_width() const { return buffers_[static_cast<size_t>(logits_buffer_)].width; }

  void sample(const SampleArgs& args, int num_rows);
  // Rows of a buffer from outside: kernel tests and benchmarks run single ops on them.
  void write_buffer(int buffer, const float* rows, int num_rows);
  // Keys and values [num_tokens, kv heads * head dim] of one layer into slots of its group.
  void write_kv(int layer, const int32_t* slots, const float* keys, const float* values, int num_tokens);
  void copy_block(int group, int source, int target);
  // Fills KV memory and every buffer with NaN: no result may depend on what was there before.
  void poison();
  // (bytes read from memory a second, byte dot product operations a second), all threads together.
  std::pair<double, double> measure_ceilings();
  size_t kv_bytes_resident() const;
  size_t weight_bytes() const { return arena_.num_bytes(); }
  int num_threads() const { return pool_.num_threads(); }
  const Kernels& kernels() const { return *kernels_; }
  const PackedWeight& weight(int i) const { return weights_[static_cast<size_t>(i)]; }
  // Seconds spent by stage kind and the number of steps, since the last call.
  std::vector<std::pair<std::string, double>> take_profile();
  void set_profile(bool on) { profile_ = on; }
  // For tests and benchmarks, which compare; then tiles of several requests in the last step, of layers of each span.
  void set_prefix_sharing(PrefixSharing sharing) { prefix_sharing_ = sharing; }
  std::vector<int> num_shared_tiles() const;

 private:
  struct Buffer {
    int width = 0;
    size_t stride = 0;
    std::vector<float> data;
    float* row(int r) { return data.data() + stride * static_cast<size_t>(r); }
  };
  struct QuantBuffer {
    int width = 0;
    std::vector<int8_t> q;
    std::vector<float> scale, scaled_sum, outlier_values;
    std::vector<int32_t> offset, half_offset, num_outliers, outlier_cols;
    void resize(size_t num_rows);
    QuantRows rows() {
      return {width, q.data(), scale.data(), scaled_sum.data(), offset.data(), half_offset.data(), num_outliers.data(), outlier_cols.data(), outlier_values.data()};
    }
  };
  struct Angles {
    std::vector<double> inv_freq;
    float factor = 1.0f;
    std::vector<float> cosines, sines;  // [num_tokens, half]
  };
  struct Group {
    int num_layers, num_kv_heads, head_dim, num_blocks, block_size;
    size_t layer_values, block_values;  // of one layer's part of a block, of a block
    Mapping memory;
    std::vector<uint8_t> touched;
  };

  void ensure_capacity(int num_rows, int num_logits_rows);
  void plan_attention(const BatchView& batch);
  void plan_stage(Stage& stage, const BatchView& batch);
  void run_stages(int thread, const BatchView& batch);
  int num_tasks(const Stage& stage, int owner) const;
  size_t end_of_segment(size_t first_stage) const;
  template <class Count, class Run>
  void share_out(size_t stage, int thread, const Count& count_of, const Run& run);
  void run_block(size_t first_stage, size_t last_stage, int block, int thread, const BatchView& batch);
  void run_task(const Stage& stage, int owner, int task, int thread, const BatchView& batch);
  void run_rows(const Stage& stage, int begin, int end, const BatchView& batch);
  void run_row_op(const RowOp& op, int row, const BatchView& batch);
  void run_linear(const Stage& stage, int row0, int row1, int first_panel, int last_panel);
  void run_attention(const Stage& stage, const AttentionTask& task, int thread, const BatchView& batch);
  // experts/stages.cpp
  void plan_experts(Stage& stage, int num_tokens);
  void run_experts(const Stage& stage, int task, const BatchView& batch);
  void group_experts(const ExpertsOp& op, int num_tokens);
  void gather_expert_row(const ExpertsOp& op, int row);
  void activate_expert_row(const ExpertsOp& op, int row);
  void multiply_experts(const Stage& stage, const ExpertsOp& op, int task);
  void route(const RowOp& op, int row);
  void combine_experts(const RowOp& op, int row);
  KVLayer kv_layer(const LayerSpec& layer) const;
  const AttentionPlan& plan_of(int layer) const { return plans_[plan_of_layer_[static_cast<size_t>(layer)]]; }

  const Kernels* kernels_;
  ThreadPool pool_;
  Arena arena_;
  std::vector<PackedWeight> weights_;
  std::vector<std::vector<float>> vectors_;
  std::vector<Buffer> buffers_;
  std::vector<QuantBuffer> quant_buffers_;
  std::vector<Angles> angles_;
  std::vector<Group> groups_;
  std::vector<LayerSpec> layers_;
  std::vector<size_t> plan_of_layer_;
  std::vector<AttentionPlan> plans_;
  std::vector<Stage> stages_;
  struct alignas(64) Counter {
    std::atomic<int> next{0};
  };
  std::unique_ptr<Counter[]> counters_;  // [stages, threads]
  std::vector<std::vector<float>> scratch_memory_;
  std::vector<AttentionScratch> scratch_;
  std::vector<std::unique_ptr<SampleScratch>> sample_scratch_;  // a thread; made by the first call
  std::vector<float> partial_;
  int rows_per_block_ = 0;  // of the current step; 0: few rows, worked on together
  std::vector<ExpertsOp> experts_;
  ExpertsRows expert_rows_;
  QuantBuffer expert_x_, expert_hidden_;
  int capacity_ = 0, logits_capacity_ = 0, logits_buffer_ = -1;
  std::vector<bool> buffer_on_logits_;
  PrefixSharing prefix_sharing_ = PrefixSharing::WhereItPays;
  bool profile_ = false;
  double profile_s_[5] = {};  // of thread 0: rows, linear, attention, head, waiting for the others
  long profile_steps_ = 0;
};

}  // namespace pagoda
