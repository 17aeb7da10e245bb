// The kernels of one instruction set as plain function pointers. isa.cpp fills one table a build.
#pragma once
#include <vector>

#include "../attention/shape.h"
#include "../sample/args.h"
#include "tensors.h"

namespace pagoda {

struct LinearTarget {
  float* out;
  size_t stride;
  const float* bias;      // or null; padded to a multiple of 16
  const float* residual;  // or null; may be `out` itself
  size_t residual_stride;
};

struct Kernels {
  const char* name;
  void (*linear)(const PackedWeight&, const QuantRows&, const float* x, size_t stride, int row0, int row1, int panel0, int panel1,
                 const LinearTarget&);
  void (*quantize_row)(const float* x, const QuantRows&, int row);
  void (*rms_norm_row)(const float* x, const float* weight, float eps, int row_width, int width, float* out);
  void (*rope_angles)(int position, const double* inv_freq, int half, float factor, float* cosines, float* sines);
  void (*rope_row)(const float* x, const float* cosines, const float* sines, int num_heads, int head_dim, int half, float* out);
  void (*gated_row)(const float* gate, const float* up, int width, bool gelu, float* out);
  void (*add_row)(const float* a, const float* b, int width, float* out);
  void (*softcap_row)(float* x, int width, float cap);
  void (*write_kv)(const AttentionShape&, const KVLayer&, int slot, const float* key, const float* value);
  void (*attend)(const AttentionShape&, const KVLayer&, const int32_t* block_table, const float* q, size_t q_stride, int first_position,
                 int num_tokens, int kv_head, int chunk0, int chunk1, AttentionScratch&, float* out, size_t out_stride, float* partial);
  void (*merge_partial)(const AttentionShape&, const float* partial, int num_chunks, int rows, int first_row, int kv_head, float* out);
  void (*sample_row)(const SampleArgs&, int row, SampleScratch&);
  double (*dot_rounds)(int rounds, int32_t* sink);  // operations of one round
  void (*layer_norm_row)(const float* x, const float* weight, const float* bias, float eps, int width, float* out);
  void (*gelu_row)(const float* x, int width, float* out);
  void (*route_row)(const float* scores, int num_experts, int num_active, bool normalised, int32_t* experts, float* weights);
  void (*add_weighted_row)(const float* x, float weight, int width, bool first, float* out);
};

// Tables that this machine can run, fastest first.
std::vector<const Kernels*> usable_kernels();
// The table called `name`, or null when it is unknown or the machine lacks the instructions.
const Kernels* kernels_for(const char* name);

}  // namespace pagoda
