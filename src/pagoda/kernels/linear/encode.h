// Weights of floats into blocks of Q8_0 or Q4_1, as weights/quantize.py says and with the same bits.
#pragma once
#include <cstddef>
#include <cstdint>

namespace pagoda {

// Encodes groups of 32 values in file type F32, F16 or BF16 to type Q8_0 or Q4_1. False when a type is another.
bool encode_groups(int from_type, const uint8_t* values, size_t num_groups, int to_type, uint8_t* blocks);

}  // namespace pagoda
