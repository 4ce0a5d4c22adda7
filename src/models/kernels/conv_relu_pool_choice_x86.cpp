#include <ATen/Version.h>

#include <string>

#include "conv_relu_pool.hpp"

namespace lockstep::kernels {

extern const ConvReluPoolKernels conv_relu_pool_generic, conv_relu_pool_avx2, conv_relu_pool_avx512;

const ConvReluPoolKernels& conv_relu_pool_kernels() {
  static const ConvReluPoolKernels& chosen = []() -> const ConvReluPoolKernels& {
    const std::string instructions = at::get_cpu_capability();
    if (instructions == "AVX512") return conv_relu_pool_avx512;
    if (instructions == "AVX2") return conv_relu_pool_avx2;
    return conv_relu_pool_generic;
  }();
  return chosen;
}

}  // namespace lockstep::kernels
