#include <algorithm>
#include <cstring>

#include "../common/tasks.h"
#include "../step.h"

namespace pagoda {
namespace {

constexpr int ROWS_PER_TASK = 16;

}  // namespace

void Model::add_experts(ExpertsOp op) {
  const int index = static_cast<int>(experts_.size());
  RowOp route;
  route.kind = RowOp::Route;
  route.a = op.router;
  route.layer = index;
  add_row_op(route, false);
  for (ExpertsPhase phase : {ExpertsPhase::Group, ExpertsPhase::Gather, ExpertsPhase::GateUp, ExpertsPhase::Activate, ExpertsPhase::Down}) {
    Stage stage;
    stage.kind = Stage::Experts;
    stage.experts = index;
    stage.phase = phase;
    stages_.push_back(std::move(stage));
  }
  RowOp combine;
  combine.kind = RowOp::CombineExperts;
  combine.out = op.out;
  combine.layer = index;
  add_row_op(combine, false);
  experts_.push_back(std::move(op));
}

// Tasks are counted before the step runs, when it is not yet known which experts it needs: one for each expert that
// could be used, and those beyond the ones that are have nothing to do.
void Model::plan_experts(Stage& stage, int num_tokens) {
  const ExpertsOp& op = experts_[at(stage.experts)];
  const int rows = num_tokens * op.num_active, most_used = std::min(rows, static_cast<int>(op.gates.size()));
  if (stage.phase == ExpertsPhase::Group) {
    ExpertsRows& r = expert_rows_;
    const size_t n = at(rows), width = at(round_up(op.width, PANEL)), ffn = at(round_up(op.ffn_size, PANEL));
    for (auto* ids : {&r.expert, &r.row, &r.token}) ids->resize(std::max(ids->size(), n));
    r.weight.resize(std::max(r.weight.size(), n));
    r.x.resize(std::max(r.x.size(), n * width));
    r.gate.resize(std::max(r.gate.size(), n * ffn));
    r.up.resize(std::max(r.up.size(), n * ffn));
    for (auto [buffer, columns] : {std::pair{&expert_x_, op.width}, std::pair{&expert_hidden_, op.ffn_size}}) {
      if (buffer->width == columns && r.quant_capacity >= n) continue;
      if (columns % GROUP) continue;  // weights in floats
      buffer->width = columns;
      buffer->resize(std::max(n, r.quant_capacity));
    }
    r.quant_capacity = std::max(n, r.quant_capacity);
  }
  switch (stage.phase) {
    case ExpertsPhase::Group: stage.num_tasks = rows ? 1 : 0; return;
    case ExpertsPhase::Gather:
    case ExpertsPhase::Activate: stage.num_tasks = ceil_div(rows, ROWS_PER_TASK); return;
    case ExpertsPhase::GateUp:
    case ExpertsPhase::Down: {
      const bool down = stage.phase == ExpertsPhase::Down;
      stage.num_panels = weights_[at(down ? op.downs[0] : op.gates[0])].num_panels() * (down ? 1 : 2);
      if (rows == 0) {
        stage.num_tasks = 0;
        return;
      }
      stage.panels_per_task = std::max(1, ceil_div(stage.num_panels * most_used, pool_.num_threads() * TASKS_PER_THREAD));
      stage.panels_per_task = std::min(stage.panels_per_task, stage.num_panels);
      stage.num_tasks = most_used * ceil_div(stage.num_panels, stage.panels_per_task);
      return;
    }
  }
}

void Model::run_experts(const Stage& stage, int task, const BatchView& batch) {
  const ExpertsOp& op = experts_[at(stage.experts)];
  switch (stage.phase) {
    case ExpertsPhase::Group: return group_experts(op, batch.num_tokens);
    case ExpertsPhase::Gather:
    case ExpertsPhase::Activate: {
      const int rows = batch.num_tokens * op.num_active, begin = task * ROWS_PER_TASK, end = std::min(rows, begin + ROWS_PER_TASK);
      for (int row = begin; row < end; row++) stage.phase == ExpertsPhase::Gather ? gather_expert_row(op, row) : activate_expert_row(op, row);
      return;
    }
    default: return multiply_experts(stage, op, task);
  }
}

// Rows in the order of experts, and of tokens within one: a counting sort.
void Model::group_experts(const ExpertsOp& op, int num_tokens) {
  ExpertsRows& r = expert_rows_;
  const int n = num_tokens * op.num_active, num_experts = static_cast<int>(op.gates.size());
  std::vector<int32_t>& next = r.next_row;
  next.assign(at(num_experts) + 1, 0);
  for (int i = 0; i < n; i++) next[at(r.expert[at(i)]) + 1]++;
  r.used.clear();
  r.first_row.clear();
  for (int e = 0; e < num_experts; e++) {
    if (next[at(e) + 1]) r.used.push_back(e), r.first_row.push_back(next[at(e)]);
    next[at(e) + 1] += next[at(e)];
  }
  r.first_row.push_back(n);
  for (int i = 0; i < n; i++) {
    const int32_t row = next[at(r.expert[at(i)])]++;
    r.row[at(i)] = row;
    r.token[at(row)] = i / op.num_active;
  }
}

void Model::gather_expert_row(const ExpertsOp& op, int row) {
  float* x = expert_rows_.x.data() + at(round_up(op.width, PANEL)) * at(row);
  std::memcpy(x, buffers_[at(op.x)].row(expert_rows_.token[at(row)]), at(op.width) * sizeof(float));
  if (!is_float(weights_[at(op.gates[0])].format) || !is_float(weights_[at(op.ups[0])].format)) kernels_->quantize_row(x, expert_x_.rows(), row);
}

void Model::activate_expert_row(const ExpertsOp& op, int row) {
  const size_t offset = at(round_up(op.ffn_size, PANEL)) * at(row);
  float* gate = expert_rows_.gate.data() + offset;
  kernels_->gated_row(gate, expert_rows_.up.data() + offset, op.ffn_size, false, gate);
  if (!is_float(weights_[at(op.downs[0])].format)) kernels_->quantize_row(gate, expert_hidden_.rows(), row);
}

void Model::multiply_experts(const Stage& stage, const ExpertsOp& op, int task) {
  ExpertsRows& r = expert_rows_;
  const int per_expert = ceil_div(stage.num_panels, stage.panels_per_task), index = task / per_expert;
  if (index >= static_cast<int>(r.used.size())) return;
  const int expert = r.used[at(index)], row0 = r.first_row[at(index)], row1 = r.first_row[at(index) + 1];
  const int first = task % per_expert * stage.panels_per_task, last = std::min(stage.num_panels, first + stage.panels_per_task);
  const bool down = stage.phase == ExpertsPhase::Down;
  const size_t width = at(round_up(op.width, PANEL)), ffn = at(round_up(op.ffn_size, PANEL));
  const auto multiply = [&](int weight, std::vector<float>& out, size_t out_stride, int offset) {
    const PackedWeight& w = weights_[at(weight)];
    const int begin = std::max(first - offset, 0), end = std::min(last - offset, w.num_panels());
    if (begin >= end) return;
    const LinearTarget target{out.data(), out_stride, nullptr, nullptr, 0};
    const QuantRows quant = is_float(w.format) ? QuantRows{} : (down ? expert_hidden_ : expert_x_).rows();
    kernels_->linear(w, quant, down ? r.gate.data() : r.x.data(), down ? ffn : width, row0, row1, begin, end, target);
  };
  if (down) return multiply(op.downs[at(expert)], r.x, width, 0);
  multiply(op.gates[at(expert)], r.gate, ffn, 0);
  multiply(op.ups[at(expert)], r.up, ffn, weights_[at(op.gates[at(expert)])].num_panels());
}

void Model::route(const RowOp& op, int row) {
  const ExpertsOp& experts = experts_[at(op.layer)];
  const size_t first = at(row) * at(experts.num_active);
  kernels_->route_row(buffers_[at(op.a)].row(row), static_cast<int>(experts.gates.size()), experts.num_active, experts.normalised,
                      expert_rows_.expert.data() + first, expert_rows_.weight.data() + first);
}

// A token's experts are summed largest weight first, whatever else the step holds.
void Model::combine_experts(const RowOp& op, int row) {
  const ExpertsOp& experts = experts_[at(op.layer)];
  float* out = buffers_[at(op.out)].row(row);
  for (int k = 0; k < experts.num_active; k++) {
    const size_t i = at(row) * at(experts.num_active) + at(k);
    kernels_->add_weighted_row(expert_rows_.x.data() + at(round_up(experts.width, PANEL)) * at(expert_rows_.row[i]), expert_rows_.weight[i],
                               experts.width, k == 0, out);
  }
}

}  // namespace pagoda
