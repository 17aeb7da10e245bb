// Python entries of the sampler. They check what `sample_row` takes for granted, since a wrong token id would
// write outside of a row.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "../common/kernel_table.h"
#include "../step.h"
#include "args.h"

namespace nb = nanobind;

namespace pagoda {

using LogitsArray = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;

// The fields of a `SamplingBatch`, in its order.
constexpr const char* SAMPLING_FIELDS[] = {
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "counter",
    "history_start_loc", "history_token_ids", "history_output_counts", "bias_start_loc", "bias_token_ids", "bias_values",
    "num_logprobs", "allowed_mask"};
constexpr size_t NUM_SAMPLING_FIELDS = sizeof(SAMPLING_FIELDS) / sizeof(SAMPLING_FIELDS[0]);

[[noreturn]] inline void refuse(const std::string& what) { throw std::invalid_argument("sample: " + what); }

// Reads fields one after the other; the arrays stay alive through the Python objects that the caller holds.
class SamplingFields {
 public:
  SamplingFields(const nb::handle* values, size_t num_rows) : values_(values), num_rows_(num_rows) {}

  template <class T>
  const T* vector(size_t size) {
    nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu> array;
    if (!nb::try_cast(values_[next_], array, false)) refuse(name() + " has the wrong type or shape, or is not contiguous");
    if (array.shape(0) != size) refuse(name() + " has " + std::to_string(array.shape(0)) + " entries, not " + std::to_string(size));
    next_++;
    return array.data();
  }
  template <class T>
  const T* per_row() { return vector<T>(num_rows_); }

  // Offsets of a ragged list: from 0, never falling. Returns how many entries the list has.
  size_t start_loc(const int32_t** out) {
    const std::string field = name();
    *out = vector<int32_t>(num_rows_ + 1);
    if ((*out)[0] != 0) refuse(field + " does not start with 0");
    for (size_t i = 0; i < num_rows_; i++)
      if ((*out)[i] > (*out)[i + 1]) refuse(field + " falls at row " + std::to_string(i));
    return static_cast<size_t>((*out)[num_rows_]);
  }
  const int32_t* token_ids(size_t size, int vocab_size) {
    const std::string field = name();
    const int32_t* ids = vector<int32_t>(size);
    for (size_t i = 0; i < size; i++)
      if (ids[i] < 0 || ids[i] >= vocab_size) refuse(field + " holds " + std::to_string(ids[i]) + ", which is outside the vocabulary");
    return ids;
  }
  const uint32_t* mask(int vocab_size) {
    if (values_[next_].is_none()) return nullptr;
    nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> array;
    if (!nb::try_cast(values_[next_], array, false) || array.shape(0) != num_rows_ ||
        array.shape(1) != (static_cast<size_t>(vocab_size) + 31) / 32)
      refuse("allowed_mask is not a contiguous uint32 array [rows, ceil(vocab_size / 32)]");
    return array.data();
  }

 private:
  std::string name() const { return SAMPLING_FIELDS[next_]; }
  const nb::handle* values_;
  size_t num_rows_, next_ = 0;
};

inline SampleArgs read_sample_args(const LogitsArray& logits, const nb::handle* values) {
  const size_t num_rows = logits.shape(0);
  if (logits.shape(1) < 1 || logits.shape(1) > static_cast<size_t>(MAX_SAMPLE_VOCAB))
    refuse("logits have " + std::to_string(logits.shape(1)) + " columns; 1 to " + std::to_string(MAX_SAMPLE_VOCAB) + " are possible");
  if (num_rows > 0 && logits.shape(1) > 1 && logits.stride(1) != 1) refuse("rows of logits are not contiguous");
  SampleArgs a{};
  a.logits = logits.data();
  a.logits_stride = static_cast<size_t>(logits.stride(0));
  a.vocab_size = static_cast<int>(logits.shape(1));
  SamplingFields fields(values, num_rows);
  a.temperature = fields.per_row<float>();
  a.top_k = fields.per_row<int32_t>();
  a.top_p = fields.per_row<float>();
  a.min_p = fields.per_row<float>();
  a.repetition_penalty = fields.per_row<float>();
  a.presence_penalty = fields.per_row<float>();
  a.frequency_penalty = fields.per_row<float>();
  a.seed = fields.per_row<uint64_t>();
  a.counter = fields.per_row<uint64_t>();
  const size_t num_history = fields.start_loc(&a.history_start_loc);
  a.history_token_ids = fields.token_ids(num_history, a.vocab_size);
  a.history_output_counts = fields.vector<int32_t>(num_history);
  const size_t num_bias = fields.start_loc(&a.bias_start_loc);
  a.bias_token_ids = fields.token_ids(num_bias, a.vocab_size);
  a.bias_values = fields.vector<float>(num_bias);
  a.num_logprobs = fields.per_row<int32_t>();
  a.allowed_mask = fields.mask(a.vocab_size);
  for (size_t i = 0; i < num_rows; i++) {
    if (!(a.temperature[i] >= 0.0f && a.temperature[i] <= 3.4e38f)) refuse("temperature of row " + std::to_string(i) + " is negative or not finite");
    if (!(a.min_p[i] >= 0.0f && a.min_p[i] <= 1.0f)) refuse("min_p of row " + std::to_string(i) + " is outside 0 to 1");
    if (a.num_logprobs[i] > a.max_logprobs) a.max_logprobs = a.num_logprobs[i];
  }
  return a;
}

template <class T>
nb::ndarray<nb::numpy, T> new_array(size_t num_rows, size_t width, bool is_matrix, T** data) {
  *data = new T[num_rows * width + 1];
  nb::capsule owner(*data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  const size_t shape[2] = {num_rows, width};
  return nb::ndarray<nb::numpy, T>(*data, is_matrix ? 2 : 1, shape, owner);
}

// Fills in the outputs and calls run(args, number of rows) without the GIL.
template <class Run>
nb::tuple sample_into_arrays(const LogitsArray& logits, const nb::handle* values, const Run& run) {
  SampleArgs a = read_sample_args(logits, values);
  const size_t num_rows = logits.shape(0), width = static_cast<size_t>(a.max_logprobs);
  auto token_ids = new_array<int32_t>(num_rows, 1, false, &a.token_ids);
  auto logprobs = new_array<float>(num_rows, 1, false, &a.logprobs);
  auto top_token_ids = new_array<int32_t>(num_rows, width, true, &a.top_token_ids);
  auto top_logprobs = new_array<float>(num_rows, width, true, &a.top_logprobs);
  {
    nb::gil_scoped_release release;
    run(a, static_cast<int>(num_rows));
  }
  return nb::make_tuple(token_ids, logprobs, top_token_ids, top_logprobs);
}

// The fields of a `SamplingBatch` by position; rows are spread over the threads of the model.
inline nb::tuple sample_on_model(Model& model, const LogitsArray& logits, const nb::args& fields) {
  if (fields.size() != NUM_SAMPLING_FIELDS) refuse("needs " + std::to_string(NUM_SAMPLING_FIELDS) + " arrays after the logits");
  nb::handle values[NUM_SAMPLING_FIELDS];
  for (size_t i = 0; i < NUM_SAMPLING_FIELDS; i++) values[i] = fields[i];
  return sample_into_arrays(logits, values, [&](const SampleArgs& a, int num_rows) { model.sample(a, num_rows); });
}

// The fields of a `SamplingBatch` by name, on this thread and with the instruction set called `isa`.
inline nb::tuple sample_with_isa(const std::string& isa, const LogitsArray& logits, const nb::kwargs& fields) {
  const Kernels* kernels = kernels_for(isa.c_str());
  if (!kernels) refuse("this machine or this build has no instruction set called '" + isa + "'");
  nb::handle values[NUM_SAMPLING_FIELDS];
  size_t num_known = 0;
  for (size_t i = 0; i < NUM_SAMPLING_FIELDS; i++) {
    values[i] = nb::none();
    if (fields.contains(SAMPLING_FIELDS[i])) {
      values[i] = fields[SAMPLING_FIELDS[i]];
      num_known++;
    }
  }
  if (num_known != fields.size()) refuse("a keyword names no field of SamplingBatch");
  return sample_into_arrays(logits, values, [&](const SampleArgs& a, int num_rows) {
    SampleScratch scratch(a.vocab_size);
    for (int row = 0; row < num_rows; row++) kernels->sample_row(a, row, scratch);
  });
}

inline void bind_sample(nb::module_& m) {
  m.def("sample", &sample_with_isa, nb::arg("isa"), nb::arg("logits"), nb::arg("fields"),
        "Choose one token a row: (token_ids, logprobs, top_token_ids, top_logprobs). See kernels/sample/reference.py.");
}

}  // namespace pagoda
