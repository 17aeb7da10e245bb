// The extension module pagoda._native: a model that backends/lowering.py assembles op by op, and kernel entries for tests.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "common/kernel_table.h"
#include "linear/encode.h"
#include "linear/pack.h"
#include "step.h"

#include "sample/bindings.h"

namespace nb = nanobind;
using namespace pagoda;

namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Doubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using MutableBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatRows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatMatrix = nb::ndarray<nb::numpy, float, nb::ndim<2>>;

const Kernels* choose_kernels(const std::string& isa) {
  if (isa.empty()) return usable_kernels().front();
  const Kernels* k = kernels_for(isa.c_str());
  if (!k) throw std::invalid_argument("this machine or this build has no instruction set called '" + isa + "'");
  return k;
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const Kernels* k : usable_kernels()) names.emplace_back(k->name);
  return names;
}

RowOp::Kind row_kind(const std::string& name) {
  static const std::pair<const char*, RowOp::Kind> kinds[] = {
      {"embed", RowOp::Embed}, {"norm", RowOp::Norm}, {"angles", RowOp::Angles}, {"rope", RowOp::Rope},
      {"write_kv", RowOp::WriteKV}, {"gated", RowOp::Gated}, {"add", RowOp::Add}, {"quantize", RowOp::Quantize},
      {"gather", RowOp::Gather}, {"softcap", RowOp::Softcap}, {"merge_attention", RowOp::MergeAttention},
      {"layer_norm", RowOp::LayerNorm}, {"add_position", RowOp::AddPosition}, {"scale", RowOp::Scale}, {"gelu", RowOp::Gelu}};
  for (const auto& [key, kind] : kinds)
    if (name == key) return kind;
  throw std::invalid_argument("unknown row op '" + name + "'");
}

FloatMatrix forward(Model& model, const Ints& token_ids, const Ints& positions, const Ints& query_start_loc, const Ints& seq_lens,
                    const std::vector<Table>& block_tables, const std::vector<Ints>& slot_mapping, const Ints& logits_rows) {
  BatchView batch{};
  batch.num_tokens = static_cast<int>(token_ids.size());
  batch.num_requests = static_cast<int>(seq_lens.size());
  batch.num_logits_rows = static_cast<int>(logits_rows.size());
  batch.token_ids = token_ids.data();
  batch.positions = positions.data();
  batch.query_start_loc = query_start_loc.data();
  batch.seq_lens = seq_lens.data();
  batch.logits_rows = logits_rows.data();
  for (const Table& t : block_tables) {
    batch.block_tables.push_back(t.data());
    batch.block_table_strides.push_back(t.shape(1));
  }
  for (const Ints& s : slot_mapping) batch.slot_mapping.push_back(s.data());
  const float* logits;
  {
    nb::gil_scoped_release release;
    logits = model.forward(batch);
  }
  const size_t shape[2] = {logits_rows.size(), static_cast<size_t>(model.logits_width())};
  const int64_t strides[2] = {static_cast<int64_t>(model.logits_stride()), 1};
  return FloatMatrix(const_cast<float*>(logits), 2, shape, nb::find(&model), strides);
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Native kernels of Pagoda; use pagoda.backends.cpu.";
  m.def("isas", &isas, "Instruction sets this machine can run, fastest first.");
  m.def("encode",
        [](int from_type, const Bytes& values, int to_type, const MutableBytes& blocks) {
          const size_t num_groups = blocks.size() / (to_type == static_cast<int>(FileType::Q8_0) ? 34 : 20);
          const size_t value_bytes = from_type == static_cast<int>(FileType::F32) ? 4 : 2;
          if (values.size() != num_groups * GROUP * value_bytes) throw std::invalid_argument("values and blocks do not match");
          nb::gil_scoped_release release;
          if (!encode_groups(from_type, values.data(), num_groups, to_type, blocks.data()))
            throw std::invalid_argument("unknown tensor type");
        },
        nb::arg("from_type"), nb::arg("values"), nb::arg("to_type"), nb::arg("blocks"),
        "Quantises groups of 32 floats; see weights/quantize.py.");
  bind_sample(m);

  nb::class_<Model>(m, "Model")
      .def("__init__", [](Model* self, const std::string& isa, int num_threads) { new (self) Model(choose_kernels(isa), num_threads); },
           nb::arg("isa"), nb::arg("num_threads"))
      .def("add_weight",
           [](Model& self, int type, const Bytes& data, int rows, int cols) {
             nb::gil_scoped_release release;
             return self.add_weight(type, data.data(), rows ? data.size() / static_cast<size_t>(rows) : 0, rows, cols);
           },
           nb::arg("type"), nb::arg("data"), nb::arg("rows"), nb::arg("cols"))
      .def("add_vector", [](Model& self, const Floats& v) { return self.add_vector(v.data(), static_cast<int>(v.size())); })
      .def("add_buffer", &Model::add_buffer, nb::arg("width"))
      .def("add_quant_buffer", &Model::add_quant_buffer, nb::arg("width"))
      .def("add_angles", [](Model& self, const Doubles& f, float factor) { return self.add_angles(f.data(), static_cast<int>(f.size()), factor); },
           nb::arg("inv_freq"), nb::arg("factor"))
      .def("add_group", &Model::add_group, nb::arg("num_layers"), nb::arg("num_kv_heads"), nb::arg("head_dim"), nb::arg("num_blocks"),
           nb::arg("block_size"))
      .def("add_layer", &Model::add_layer, nb::arg("group"), nb::arg("index_in_group"), nb::arg("num_heads"), nb::arg("scale"),
           nb::arg("softcap"), nb::arg("window"))
      .def("row_op",
           [](Model& self, const std::string& kind, int a, int b, int out, int weight, int layer, int width, float value, bool gelu,
              bool on_logits_rows) {
             RowOp op;
             op.kind = row_kind(kind);
             op.a = a, op.b = b, op.out = out, op.weight = weight, op.layer = layer, op.width = width, op.value = value, op.gelu = gelu;
             self.add_row_op(op, on_logits_rows);
           },
           nb::arg("kind"), nb::kw_only(), nb::arg("a") = -1, nb::arg("b") = -1, nb::arg("out") = -1, nb::arg("weight") = -1,
           nb::arg("layer") = -1, nb::arg("width") = 0, nb::arg("value") = 0.0f, nb::arg("gelu") = false, nb::arg("on_logits_rows") = false)
      .def("linear_op",
           [](Model& self, int x, int quant, int out, int weight, int bias, int residual, bool on_logits_rows) {
             self.add_linear({x, quant, out, weight, bias, residual}, on_logits_rows);
           },
           nb::kw_only(), nb::arg("x"), nb::arg("quant"), nb::arg("out"), nb::arg("weight"), nb::arg("bias") = -1, nb::arg("residual") = -1,
           nb::arg("on_logits_rows") = false)
      .def("attention_op", [](Model& self, int q, int out, int layer) { self.add_attention({q, out, layer}); }, nb::kw_only(), nb::arg("q"),
           nb::arg("out"), nb::arg("layer"))
      .def("experts_op",
           [](Model& self, int x, int router, int out, std::vector<int> gates, std::vector<int> ups, std::vector<int> downs, int width,
              int ffn_size, int num_active, bool normalised) {
             self.add_experts({x, router, out, std::move(gates), std::move(ups), std::move(downs), width, ffn_size, num_active, normalised});
           },
           nb::kw_only(), nb::arg("x"), nb::arg("router"), nb::arg("out"), nb::arg("gates"), nb::arg("ups"), nb::arg("downs"), nb::arg("width"),
           nb::arg("ffn_size"), nb::arg("num_active"), nb::arg("normalised"))
      .def("set_logits", &Model::set_logits)
      .def("forward", &forward)
      .def("sample", &sample_on_model)
      .def("copy_block", &Model::copy_block, nb::call_guard<nb::gil_scoped_release>())
      .def("measure_ceilings", &Model::measure_ceilings, nb::call_guard<nb::gil_scoped_release>())
      .def("poison", &Model::poison)
      .def("write_kv",
           [](Model& self, int layer, const Ints& slots, const FloatRows& keys, const FloatRows& values) {
             self.write_kv(layer, slots.data(), keys.data(), values.data(), static_cast<int>(slots.size()));
           })
      .def("write_buffer", [](Model& self, int buffer, const FloatRows& rows) { self.write_buffer(buffer, rows.data(), static_cast<int>(rows.shape(0))); })
      .def("unpack_row",
           [](Model& self, int weight, int row) {
             const PackedWeight& w = self.weight(weight);
             auto* out = new float[static_cast<size_t>(w.cols)];
             unpack_row(w, row, out);
             nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<float*>(p); });
             const size_t shape[1] = {static_cast<size_t>(w.cols)};
             return nb::ndarray<nb::numpy, float, nb::ndim<1>>(out, 1, shape, owner);
           })
      .def("take_profile", &Model::take_profile)
      .def("set_profile", &Model::set_profile)
      .def("set_prefix_sharing",
           [](Model& self, const std::string& sharing) {
             if (sharing != "never" && sharing != "auto" && sharing != "always") throw std::invalid_argument("unknown sharing '" + sharing + "'");
             self.set_prefix_sharing(sharing == "never" ? PrefixSharing::Never : sharing == "auto" ? PrefixSharing::WhereItPays : PrefixSharing::Always);
           })
      .def_prop_ro("num_shared_tiles", &Model::num_shared_tiles)
      .def_prop_ro("kv_bytes_resident", &Model::kv_bytes_resident)
      .def_prop_ro("weight_bytes", &Model::weight_bytes)
      .def_prop_ro("num_threads", &Model::num_threads)
      .def_prop_ro("isa", [](const Model& self) { return std::string(self.kernels().name); });
}
