// All kernels for one instruction set. Built once for each, with PAGODA_ISA naming the inner namespace; nothing
// here may leave an inline function of the standard library behind, since the linker could pick this build's
// copy for code that runs on lesser machines.
#include "activation/cpu.h"
#include "attention/cpu.h"
#include "common/ceilings.h"
#include "common/kernel_table.h"
#include "experts/cpu.h"
#include "layer_norm/cpu.h"
#include "linear/cpu.h"
#include "quantize/cpu.h"
#include "rms_norm/cpu.h"
#include "rope/cpu.h"
#include "sample/cpu.h"

#define PAGODA_STRING2(x) #x
#define PAGODA_STRING(x) PAGODA_STRING2(x)

namespace pagoda {
namespace PAGODA_ISA {

extern const Kernels kernels;
const Kernels kernels = {
    PAGODA_STRING(PAGODA_ISA), linear, quantize_row, rms_norm_row, rope_angles, rope_row, gated_row, add_row,
    softcap_row, write_kv, attend, merge_partial, sample_row, dot_rounds, layer_norm_row, gelu_row, route_row, add_weighted_row,
};

}  // namespace PAGODA_ISA
}  // namespace pagoda
