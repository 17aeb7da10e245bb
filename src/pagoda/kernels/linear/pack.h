// Weights of a model file into panels (see common/tensors.h for the layouts). Exact: no value changes, but that
// IQ4_XS has its scales rounded to half precision and MXFP4 loses values below 4e-7.
#pragma once
#include <cstdint>

#include "../common/tensors.h"

namespace pagoda {

// Numbers of GGUF's element types (ggml_type).
enum class FileType : int {
  F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14,
  IQ4_NL = 20, IQ4_XS = 23, BF16 = 30, MXFP4 = 39
};

// False when the type is unknown.
bool packed_format(int file_type, Format* format);

// Packs panels [first, last) from rows of `row_bytes` contiguous bytes. Rows beyond the last are zero.
void pack_panels(int file_type, const uint8_t* rows, size_t row_bytes, const PackedWeight& weight, int first, int last);

// Reads one row back as floats [cols]; what an embedding look-up does.
void unpack_row(const PackedWeight& weight, int row, float* out);

}  // namespace pagoda
