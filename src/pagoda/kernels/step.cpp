#include "step.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "common/tasks.h"
#include "linear/pack.h"

namespace pagoda {
namespace {

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

constexpr const char* PROFILE_KINDS[] = {"row", "linear", "attention", "head", "wait"};
constexpr int NUM_PROFILE_KINDS = 5;
int profile_kind(const Stage& stage) {
  if (stage.kind == Stage::Experts) return Stage::Linear;
  return stage.kind == Stage::Linear && stage.on_logits_rows ? 3 : static_cast<int>(stage.kind);
}
// Whether its rows do not depend on other rows of the step.
bool is_local(const Stage& stage) { return (stage.kind == Stage::Row || stage.kind == Stage::Linear) && !stage.on_logits_rows; }

constexpr int MIN_BLOCK = 16, MAX_BLOCK = 128;  // rows: enough to use weights often, few enough for the second-level cache

}  // namespace

Model::Model(const Kernels* kernels, int num_threads) : kernels_(kernels), pool_(num_threads) {
  scratch_.resize(at(pool_.num_threads()));
  scratch_memory_.resize(at(pool_.num_threads()));
}

int Model::add_weight(int file_type, const uint8_t* data, size_t row_bytes, int rows, int cols) {
  PackedWeight w;
  if (!packed_format(file_type, &w.format)) throw std::invalid_argument("unknown tensor type");
  w.rows = rows;
  w.cols = cols;
  if (!is_float(w.format) && (cols % GROUP != 0 || cols % block_inputs(w.format) != 0))
    throw std::invalid_argument("a row is no whole number of quantisation blocks");
  w.data = arena_.allocate(w.num_bytes());
  const int num_panels = w.num_panels(), step = std::max(1, num_panels / (pool_.num_threads() * TASKS_PER_THREAD));
  std::atomic<int> next{0};
  pool_.run([&](int) {
    for (int p = next.fetch_add(step); p < num_panels; p = next.fetch_add(step))
      pack_panels(file_type, data, row_bytes, w, p, std::min(p + step, num_panels));
  });
  weights_.push_back(w);
  return static_cast<int>(weights_.size()) - 1;
}

int Model::add_vector(const float* data, int size) {
  std::vector<float> v(at(round_up(size, PANEL)), 0.0f);
  std::copy(data, data + size, v.begin());
  vectors_.push_back(std::move(v));
  return static_cast<int>(vectors_.size()) - 1;
}

int Model::add_buffer(int width) {
  Buffer b;
  b.width = width;
  b.stride = at(round_up(width, PANEL));
  buffers_.push_back(std::move(b));
  buffer_on_logits_.push_back(false);
  return static_cast<int>(buffers_.size()) - 1;
}

int Model::add_quant_buffer(int width) {
  QuantBuffer b;
  b.width = width;
  quant_buffers_.push_back(std::move(b));
  return static_cast<int>(quant_buffers_.size()) - 1;
}

void Model::QuantBuffer::resize(size_t num_rows) {
  const size_t n = at(width) * num_rows, outliers = at(QuantRows::max_outliers(width)) * num_rows;
  q.resize(n);
  scale.resize(n / 32);
  scaled_sum.resize(n / 32);
  offset.resize(n / 32);
  half_offset.resize(n / 16);
  num_outliers.resize(num_rows);
  outlier_cols.resize(outliers);
  outlier_values.resize(outliers);
}

int Model::add_angles(const double* inv_freq, int half, float factor) {
  Angles a;
  a.inv_freq.assign(inv_freq, inv_freq + half);
  a.factor = factor;
  angles_.push_back(std::move(a));
  return static_cast<int>(angles_.size()) - 1;
}

int Model::add_group(int num_layers, int num_kv_heads, int head_dim, int num_blocks, int block_size) {
  if (block_size % 16 != 0) throw std::invalid_argument("block_size must be a multiple of 16");
  if (head_dim > MAX_HEAD_DIM) throw std::invalid_argument("head_dim is larger than this build supports");
  if (head_dim % 2 != 0) throw std::invalid_argument("head_dim must be even");
  const size_t layer_values = at(num_kv_heads) * AttentionShape{0, num_kv_heads, head_dim, block_size, 0.0f, 0.0f, 0}.head_size();
  const size_t block_values = layer_values * at(num_layers);
  groups_.push_back({num_layers, num_kv_heads, head_dim, num_blocks, block_size, layer_values, block_values,
                     Mapping(block_values * 2 * at(num_blocks), true), std::vector<uint8_t>(at(num_blocks), 0)});
  return static_cast<int>(groups_.size()) - 1;
}

int Model::add_layer(int group, int index_in_group, int num_heads, float scale, float softcap, int window) {
  const Group& g = groups_[at(group)];
  if (num_heads / g.num_kv_heads > MAX_ATTENTION_ROWS) throw std::invalid_argument("too many query heads for one KV head");
  LayerSpec layer{group, index_in_group, {num_heads, g.num_kv_heads, g.head_dim, g.block_size, scale, softcap, window}};
  size_t plan = 0;
  while (plan < plans_.size() && !plans_[plan].fits(group, layer.shape)) plan++;
  if (plan == plans_.size()) plans_.emplace_back(group, layer.shape);
  layers_.push_back(layer);
  plan_of_layer_.push_back(plan);
  return static_cast<int>(layers_.size()) - 1;
}

void Model::add_row_op(const RowOp& op, bool on_logits_rows) {
  if (stages_.empty() || stages_.back().kind != Stage::Row || stages_.back().on_logits_rows != on_logits_rows) {
    Stage stage;
    stage.kind = Stage::Row;
    stage.on_logits_rows = on_logits_rows;
    stages_.push_back(std::move(stage));
  }
  stages_.back().row_ops.push_back(op);
}

void Model::add_linear(const LinearOp& op, bool on_logits_rows) {
  bool joins = !stages_.empty() && stages_.back().kind == Stage::Linear && stages_.back().on_logits_rows == on_logits_rows;
  if (joins)
    for (const LinearOp& other : stages_.back().linear_ops)
      joins = joins && other.out != op.x && other.out != op.residual && other.out != op.out && other.residual != op.out && other.x != op.out;
  if (!joins) {
    Stage stage;
    stage.kind = Stage::Linear;
    stage.on_logits_rows = on_logits_rows;
    stages_.push_back(std::move(stage));
  }
  stages_.back().linear_ops.push_back(op);
  stages_.back().num_panels += weights_[at(op.weight)].num_panels();
  if (on_logits_rows) buffer_on_logits_[at(op.out)] = true;
}

void Model::add_attention(const AttentionOp& op) {
  Stage stage;
  stage.kind = Stage::Attention;
  stage.attention = op;
  stages_.push_back(std::move(stage));
}

KVLayer Model::kv_layer(const LayerSpec& layer) const {
  const Group& g = groups_[at(layer.group)];
  auto* base = reinterpret_cast<int16_t*>(g.memory.data());
  return {base + g.layer_values * at(layer.index_in_group), g.block_values};
}

void Model::ensure_capacity(int num_rows, int num_logits_rows) {
  if (!counters_) counters_ = std::make_unique<Counter[]>((stages_.size() + 1) * at(pool_.num_threads()));
  const int rows = std::max(num_rows, 1), logits = std::max(num_logits_rows, 1);
  const bool grow = rows > capacity_, grow_logits = logits > logits_capacity_;
  if (grow) capacity_ = rows;
  if (grow_logits) logits_capacity_ = logits;
  for (size_t i = 0; i < buffers_.size(); i++) {
    Buffer& b = buffers_[i];
    const size_t size = b.stride * at(buffer_on_logits_[i] ? logits_capacity_ : capacity_);
    if (b.data.size() < size) std::vector<float>(size).swap(b.data);  // old contents are of no use: no copy
  }
  if (grow) {
    for (QuantBuffer& b : quant_buffers_) b.resize(at(capacity_));
    for (Angles& a : angles_) {
      a.cosines.resize(a.inv_freq.size() * at(capacity_));
      a.sines.resize(a.inv_freq.size() * at(capacity_));
    }
  }
  if (!scratch_[0].scores) {
    int width = 16;
    for (const Group& g : groups_) width = std::max(width, round_up(g.head_dim, 16));
    for (size_t t = 0; t < scratch_.size(); t++) {
      // In floats: scores, the chunk's and the whole result; then int16 weights and queries.
      scratch_memory_[t].assign(at(MAX_ATTENTION_ROWS) * (at(KEY_CHUNK + 2 * width) + at(KEY_CHUNK + width) / 2) + 16, 0.0f);
      float* p = scratch_memory_[t].data();
      scratch_[t].scores = p;
      scratch_[t].chunk_out = p + MAX_ATTENTION_ROWS * KEY_CHUNK;
      scratch_[t].out = scratch_[t].chunk_out + MAX_ATTENTION_ROWS * width;
      scratch_[t].weights = reinterpret_cast<int16_t*>(scratch_[t].out + MAX_ATTENTION_ROWS * width);
      scratch_[t].queries = scratch_[t].weights + MAX_ATTENTION_ROWS * KEY_CHUNK;
    }
  }
}

namespace {

// Rows of blocks of about the same size, the same number of blocks for every thread; 0 if there are too few.
int choose_rows_per_block(int num_rows, int num_threads) {
  if (num_rows < MIN_BLOCK * num_threads) return 0;
  const int num_blocks = num_threads * ceil_div(num_rows, num_threads * MAX_BLOCK);
  return round_up(ceil_div(num_rows, num_blocks), 8);  // of tiles
}

}  // namespace

void Model::plan_attention(const BatchView& batch) {
  const int row_block = rows_per_block_ ? rows_per_block_ : std::max(1, ceil_div(batch.num_tokens, pool_.num_threads()));
  size_t partial_size = 0;
  for (AttentionPlan& plan : plans_) {
    plan.make(batch, pool_.num_threads(), row_block, prefix_sharing_);
    partial_size = std::max(partial_size, plan.partial_size());
  }
  if (partial_.size() < partial_size) partial_.resize(partial_size);
}

std::vector<int> Model::num_shared_tiles() const {
  std::vector<int> counts;
  for (const AttentionPlan& plan : plans_) counts.push_back(plan.num_shared_tiles());
  return counts;
}

void Model::plan_stage(Stage& stage, const BatchView& batch) {
  const int threads = pool_.num_threads();
  stage.num_rows = stage.on_logits_rows ? batch.num_logits_rows : batch.num_tokens;
  stage.rows_per_task = std::max(1, std::min(16, ceil_div(stage.num_rows, threads)));
  stage.panels_per_task = std::max(1, ceil_div(stage.num_panels, threads * TASKS_PER_THREAD));
  if (stage.kind == Stage::Experts) plan_experts(stage, stage.num_rows);
}

// The `owner`'s part of `num_tasks` tasks in order: [first_task(.., owner), first_task(.., owner + 1)).
static int first_task(int num_tasks, int owner, int threads) { return num_tasks * owner / threads; }

int Model::num_tasks(const Stage& stage, int owner) const {
  if (stage.num_rows == 0) return 0;
  if (stage.kind == Stage::Attention) return static_cast<int>(plan_of(stage.attention.layer).tasks(owner).size());
  const int count = stage.kind == Stage::Experts ? stage.num_tasks
                    : stage.kind == Stage::Row   ? ceil_div(stage.num_rows, stage.rows_per_task)
                                                 : ceil_div(stage.num_panels, stage.panels_per_task);
  return first_task(count, owner + 1, pool_.num_threads()) - first_task(count, owner, pool_.num_threads());
}

const float* Model::forward(const BatchView& batch) {
  ensure_capacity(batch.num_tokens, batch.num_logits_rows);
  rows_per_block_ = choose_rows_per_block(batch.num_tokens, pool_.num_threads());
  plan_attention(batch);
  for (size_t g = 0; g < groups_.size(); g++)
    for (int t = 0; t < batch.num_tokens; t++) groups_[g].touched[at(batch.slot_mapping[g][t] / groups_[g].block_size)] = 1;
  for (size_t i = 0; i < stages_.size(); i++) {
    plan_stage(stages_[i], batch);
    for (int t = 0; t < pool_.num_threads(); t++) counters_[i * at(pool_.num_threads()) + at(t)].next.store(0, std::memory_order_relaxed);
  }
  pool_.run([&](int thread) { run_stages(thread, batch); });
  profile_steps_ += profile_;
  return buffers_[at(logits_buffer_)].data.data();
}

// Stages from `first` on that a thread may run for some rows without waiting for others.
size_t Model::end_of_segment(size_t first) const {
  size_t end = first;
  while (rows_per_block_ && end < stages_.size() && is_local(stages_[end])) end++;
  return std::max(end, first + 1);
}

// Calls run(owner, i) for each i < count_of(owner), own ones first. A single task is its owner's: no other thread need
// look at the counter, which would move it between cores in each of a decode step's row stages.
template <class Count, class Run>
void Model::share_out(size_t stage, int thread, const Count& count_of, const Run& run) {
  const int threads = pool_.num_threads();
  int count_in_all = 0;
  for (int owner = 0; owner < threads; owner++) count_in_all += count_of(owner);
  if (count_in_all == 1) {
    if (count_of(thread) == 1) run(thread, 0);
    return;
  }
  for (int turn = 0; turn < threads; turn++) {
    const int owner = (thread + turn) % threads, count = count_of(owner);
    auto& next = counters_[stage * at(threads) + at(owner)].next;
    for (int i; next.load(std::memory_order_relaxed) < count && (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) run(owner, i);
  }
}

void Model::run_stages(int thread, const BatchView& batch) {
  const int threads = pool_.num_threads();
  for (size_t i = 0, end; i < stages_.size(); i = end) {
    end = end_of_segment(i);
    const Stage& stage = stages_[i];
    const double start = profile_ && thread == 0 ? seconds() : 0.0;
    if (rows_per_block_ && is_local(stage)) {
      const int num_blocks = ceil_div(stage.num_rows, rows_per_block_);
      share_out(i, thread, [&](int owner) { return (num_blocks - owner + threads - 1) / threads; },
                [&](int owner, int block) { run_block(i, end, owner + block * threads, thread, batch); });
    } else {
      share_out(i, thread, [&](int owner) { return num_tasks(stage, owner); },
                [&](int owner, int task) { run_task(stage, owner, task, thread, batch); });
      if (profile_ && thread == 0) profile_s_[profile_kind(stage)] += seconds() - start;
    }
    const double done = profile_ && thread == 0 ? seconds() : 0.0;
    pool_.barrier();
    if (profile_ && thread == 0) profile_s_[NUM_PROFILE_KINDS - 1] += seconds() - done;
  }
}

void Model::run_block(size_t first_stage, size_t last_stage, int block, int thread, const BatchView& batch) {
  for (size_t i = first_stage; i < last_stage; i++) {
    const Stage& stage = stages_[i];
    const double start = profile_ && thread == 0 ? seconds() : 0.0;
    const int begin = block * rows_per_block_, end = std::min(stage.num_rows, begin + rows_per_block_);
    if (stage.kind == Stage::Row) run_rows(stage, begin, end, batch);
    else run_linear(stage, begin, end, 0, stage.num_panels);
    if (profile_ && thread == 0) profile_s_[profile_kind(stage)] += seconds() - start;
  }
}

void Model::run_task(const Stage& stage, int owner, int task, int thread, const BatchView& batch) {
  const int threads = pool_.num_threads();
  if (stage.kind == Stage::Attention)
    return run_attention(stage, plan_of(stage.attention.layer).tasks(owner)[at(task)], thread, batch);
  if (stage.kind == Stage::Row) {
    const int begin = (first_task(ceil_div(stage.num_rows, stage.rows_per_task), owner, threads) + task) * stage.rows_per_task;
    return run_rows(stage, begin, std::min(stage.num_rows, begin + stage.rows_per_task), batch);
  }
  if (stage.kind == Stage::Experts) return run_experts(stage, first_task(stage.num_tasks, owner, threads) + task, batch);
  const int first = (first_task(ceil_div(stage.num_panels, stage.panels_per_task), owner, threads) + task) * stage.panels_per_task;
  run_linear(stage, 0, stage.num_rows, first, std::min(stage.num_panels, first + stage.panels_per_task));
}

void Model::run_rows(const Stage& stage, int begin, int end, const BatchView& batch) {
  for (int row = begin; row < end; row++)
    for (const RowOp& op : stage.row_ops) run_row_op(op, row, batch);
}

void Model::run_row_op(const RowOp& op, int row, const BatchView& batch) {
  const auto buffer = [&](int i) -> Buffer& { return buffers_[at(i)]; };
  switch (op.kind) {
    case RowOp::Embed: {
      Buffer& out = buffer(op.out);
      unpack_row(weights_[at(op.weight)], batch.token_ids[row], out.row(row));
      if (op.value != 1.0f)
        for (int i = 0; i < out.width; i++) out.row(row)[i] *= op.value;
      return;
    }
    case RowOp::Norm:
      return kernels_->rms_norm_row(buffer(op.a).row(row), vectors_[at(op.weight)].data(), op.value, buffer(op.a).width, op.width,
                                    buffer(op.out).row(row));
    case RowOp::Angles: {
      Angles& a = angles_[at(op.b)];
      const size_t half = a.inv_freq.size(), offset = half * at(row);
      return kernels_->rope_angles(batch.positions[row], a.inv_freq.data(), static_cast<int>(half), a.factor, a.cosines.data() + offset,
                                   a.sines.data() + offset);
    }
    case RowOp::Rope: {
      const Angles& a = angles_[at(op.b)];
      const size_t half = a.inv_freq.size(), offset = half * at(row);
      return kernels_->rope_row(buffer(op.a).row(row), a.cosines.data() + offset, a.sines.data() + offset, buffer(op.a).width / op.width,
                                op.width, static_cast<int>(half), buffer(op.out).row(row));
    }
    case RowOp::WriteKV: {
      const LayerSpec& layer = layers_[at(op.layer)];
      return kernels_->write_kv(layer.shape, kv_layer(layer), batch.slot_mapping[at(layer.group)][row], buffer(op.a).row(row),
                                buffer(op.b).row(row));
    }
    case RowOp::Gated:
      return kernels_->gated_row(buffer(op.a).row(row), buffer(op.b).row(row), buffer(op.a).width, op.gelu, buffer(op.out).row(row));
    case RowOp::Add:
      return kernels_->add_row(buffer(op.a).row(row), buffer(op.b).row(row), buffer(op.a).width, buffer(op.out).row(row));
    case RowOp::Quantize:
      return kernels_->quantize_row(buffer(op.a).row(row), quant_buffers_[at(op.out)].rows(), row);
    case RowOp::Gather:
      std::memcpy(buffer(op.out).row(row), buffer(op.a).row(batch.logits_rows[row]), at(buffer(op.a).width) * sizeof(float));
      return;
    case RowOp::Softcap:
      return kernels_->softcap_row(buffer(op.a).row(row), buffer(op.a).width, op.value);
    case RowOp::LayerNorm:
      return kernels_->layer_norm_row(buffer(op.a).row(row), vectors_[at(op.weight)].data(), vectors_[at(op.b)].data(), op.value, buffer(op.a).width,
                                      buffer(op.out).row(row));
    case RowOp::AddPosition:
      unpack_row(weights_[at(op.weight)], batch.positions[row], buffer(op.out).row(row));
      return kernels_->add_row(buffer(op.out).row(row), buffer(op.a).row(row), buffer(op.a).width, buffer(op.out).row(row));
    case RowOp::Scale:
      for (int i = 0; i < buffer(op.a).width; i++) buffer(op.out).row(row)[i] = buffer(op.a).row(row)[i] * op.value;
      return;
    case RowOp::Gelu:
      return kernels_->gelu_row(buffer(op.a).row(row), buffer(op.a).width, buffer(op.out).row(row));
    case RowOp::Route:
      return route(op, row);
    case RowOp::CombineExperts:
      return combine_experts(op, row);
    case RowOp::MergeAttention: {
      const LayerSpec& layer = layers_[at(op.layer)];
      const AttentionPlan& plan = plan_of(op.layer);
      const TokenParts& parts = plan.parts_of(row);
      for (int h = 0; h < layer.shape.num_kv_heads && parts.num_parts > 0; h++)
        kernels_->merge_partial(layer.shape, partial_.data() + parts.offset + plan.part_size() * at(parts.num_parts * h), parts.num_parts, h,
                                buffer(op.out).row(row));
      return;
    }
  }
}

void Model::run_linear(const Stage& stage, int row0, int row1, int first, int last) {
  int offset = 0;
  for (const LinearOp& op : stage.linear_ops) {
    const PackedWeight& w = weights_[at(op.weight)];
    const int begin = std::max(first, offset) - offset, end = std::min(last - offset, w.num_panels());
    offset += w.num_panels();
    if (begin >= end) continue;
    Buffer& out = buffers_[at(op.out)];
    Buffer& x = buffers_[at(op.x)];
    LinearTarget target{out.data.data(), out.stride, op.bias < 0 ? nullptr : vectors_[at(op.bias)].data(), nullptr, 0};
    if (op.residual >= 0) {
      target.residual = buffers_[at(op.residual)].data.data();
      target.residual_stride = buffers_[at(op.residual)].stride;
    }
    const QuantRows quant = op.quant < 0 ? QuantRows{} : quant_buffers_[at(op.quant)].rows();
    kernels_->linear(w, quant, x.data.data(), x.stride, row0, row1, begin, end, target);
  }
}

void Model::run_attention(const Stage& stage, const AttentionTask& task, int thread, const BatchView& batch) {
  const LayerSpec& layer = layers_[at(stage.attention.layer)];
  const AttentionPlan& plan = plan_of(stage.attention.layer);
  Buffer& q = buffers_[at(stage.attention.q)];
  Buffer& out = buffers_[at(stage.attention.out)];
  AttentionTile tile;
  tile.block_table = batch.block_table(layer.group, task.request);
  tile.num_tokens = task.num_tokens;
  tile.kv_head = task.kv_head;
  tile.chunk0 = task.chunk0;
  tile.chunk1 = task.chunk1;
  tile.output = task.output;
  for (int i = 0; i < task.num_tokens; i++) {
    const int token = plan.tokens(task)[i];
    tile.queries[i] = {q.row(token), task.output == AttentionOutput::Result ? out.row(token) : partial_.data() + plan.part_offset(task, token),
                       batch.positions[token]};
  }
  kernels_->attend(layer.shape, kv_layer(layer), tile, scratch_[at(thread)]);
}

void Model::sample(const SampleArgs& args, int num_rows) {
  sample_scratch_.resize(at(pool_.num_threads()));
  for (auto& scratch : sample_scratch_)
    if (!scratch) scratch = std::make_unique<SampleScratch>(args.vocab_size);
  std::atomic<int> next{0};
  pool_.run([&](int thread) {
    for (int row = next.fetch_add(1); row < num_rows; row = next.fetch_add(1)) kernels_->sample_row(args, row, *sample_scratch_[at(thread)]);
  });
}

void Model::write_buffer(int buffer, const float* rows, int num_rows) {
  ensure_capacity(num_rows, num_rows);
  Buffer& b = buffers_[at(buffer)];
  for (int r = 0; r < num_rows; r++) std::memcpy(b.row(r), rows + at(r) * at(b.width), at(b.width) * sizeof(float));
}

void Model::write_kv(int layer, const int32_t* slots, const float* keys, const float* values, int num_tokens) {
  const LayerSpec& spec = layers_[at(layer)];
  const size_t width = at(spec.shape.num_kv_heads) * at(spec.shape.head_dim);
  for (int t = 0; t < num_tokens; t++) kernels_->write_kv(spec.shape, kv_layer(spec), slots[t], keys + width * at(t), values + width * at(t));
}

void Model::copy_block(int group, int source, int target) {
  Group& g = groups_[at(group)];
  if (source < 0 || target < 0 || source >= g.num_blocks || target >= g.num_blocks) throw std::out_of_range("no such block");
  const size_t bytes = g.block_values * 2;
  std::memcpy(g.memory.data() + bytes * at(target), g.memory.data() + bytes * at(source), bytes);
  g.touched[at(target)] = 1;
}

void Model::poison() {
  for (Group& g : groups_) std::memset(g.memory.data(), 0xff, g.memory.num_bytes());
  for (Buffer& b : buffers_) std::memset(b.data.data(), 0xff, b.data.size() * sizeof(float));
  for (QuantBuffer& b : quant_buffers_) std::memset(b.scale.data(), 0xff, b.scale.size() * sizeof(float));
  std::memset(partial_.data(), 0xff, partial_.size() * sizeof(float));
  for (auto& memory : scratch_memory_) std::memset(memory.data(), 0xff, memory.size() * sizeof(float));
}

std::pair<double, double> Model::measure_ceilings() {
  constexpr size_t BYTES = size_t{256} << 20, PASSES = 4;  // far beyond any cache
  constexpr int ROUNDS = 5000000;
  const Mapping memory(BYTES, true);
  std::memset(memory.data(), 1, BYTES);
  std::atomic<uint64_t> sink{0};
  const size_t share = BYTES / at(pool_.num_threads());
  double start = seconds();
  pool_.run([&](int thread) {
    const auto* words = reinterpret_cast<const uint64_t*>(memory.data() + share * at(thread));
    uint64_t sums[4] = {};
    for (size_t pass = 0; pass < PASSES; pass++)
      for (size_t i = 0; i + 4 <= share / 8; i += 4)
        for (size_t j = 0; j < 4; j++) sums[j] += words[i + j];
    sink += sums[0] + sums[1] + sums[2] + sums[3];
  });
  const double read_s = seconds() - start;
  double operations = 0.0;
  start = seconds();
  pool_.run([&](int thread) {
    int32_t sum = 0;
    const double per_round = kernels_->dot_rounds(ROUNDS, &sum);
    if (thread == 0) operations = per_round;
    sink += static_cast<uint64_t>(sum);
  });
  const double dot_s = seconds() - start;
  return {static_cast<double>(share * at(pool_.num_threads()) * PASSES) / read_s, operations * ROUNDS * pool_.num_threads() / dot_s};
}

size_t Model::kv_bytes_resident() const {
  size_t bytes = 0;
  for (const Group& g : groups_)
    for (uint8_t touched : g.touched) bytes += touched ? g.block_values * 2 : 0;
  return bytes;
}

std::vector<std::pair<std::string, double>> Model::take_profile() {
  std::vector<std::pair<std::string, double>> result;
  for (int kind = 0; kind < NUM_PROFILE_KINDS; kind++) result.emplace_back(PROFILE_KINDS[kind], profile_s_[kind]);
  result.emplace_back("steps", static_cast<double>(profile_steps_));
  std::fill(profile_s_, profile_s_ + NUM_PROFILE_KINDS, 0.0);
  profile_steps_ = 0;
  return result;
}

}  // namespace pagoda
