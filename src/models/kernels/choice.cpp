#include <ATen/Version.h>

#include <string>

#include "kernels.hpp"

namespace lockstep::kernels {

extern const Kernels generic, avx2, avx512;  // the last two on x86 alone

const Kernels& of_this_cpu() {
  static const Kernels& chosen = []() -> const Kernels& {
#ifdef __x86_64__
    const std::string instructions = at::get_cpu_capability();
    if (instructions == "AVX512") return avx512;
    if (instructions == "AVX2") return avx2;
#endif
    return generic;
  }();
  return chosen;
}

}  // namespace lockstep::kernels
