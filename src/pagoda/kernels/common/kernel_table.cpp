#include "kernel_table.h"

#include <cstring>

#include "cpu_features.h"

namespace pagoda {

#if defined(__x86_64__)
#if !defined(PAGODA_EMULATE_AVX512)
namespace avx512_bf16 { extern const Kernels kernels; }
#endif
namespace avx512 { extern const Kernels kernels; }
namespace avx2_vnni { extern const Kernels kernels; }
namespace avx2 { extern const Kernels kernels; }
#elif defined(__aarch64__)
namespace neon_dotprod { extern const Kernels kernels; }
#endif
namespace portable { extern const Kernels kernels; }

std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> usable;
#if defined(__x86_64__)
#if !defined(PAGODA_EMULATE_AVX512)
  if (has_avx512_bf16()) usable.push_back(&avx512_bf16::kernels);
#endif
  if (has_avx512_vnni()) usable.push_back(&avx512::kernels);
  if (has_avx2_vnni()) usable.push_back(&avx2_vnni::kernels);
  if (has_avx2()) usable.push_back(&avx2::kernels);
#elif defined(__aarch64__)
  if (has_neon_dotprod()) usable.push_back(&neon_dotprod::kernels);
#endif
  usable.push_back(&portable::kernels);
  return usable;
}

const Kernels* kernels_for(const char* name) {
  for (const Kernels* k : usable_kernels())
    if (std::strcmp(k->name, name) == 0) return k;
  return nullptr;
}

}  // namespace pagoda
