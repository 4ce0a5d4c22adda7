#include <ATen/Version.h>

#include <string>

#include "batch_norm_relu.hpp"
#include "conv_relu_pool.hpp"
#include "matrices.hpp"
#include "winograd.hpp"

namespace lockstep::kernels {

extern const ConvReluPoolKernels conv_relu_pool_generic, conv_relu_pool_avx2, conv_relu_pool_avx512;
extern const BatchNormReluKernels batch_norm_relu_generic, batch_norm_relu_avx2, batch_norm_relu_avx512;
extern const MatrixKernels matrices_generic, matrices_avx2, matrices_avx512;
extern const WinogradKernels winograd_avx2, winograd_avx512;

namespace {

template <class Kernels>
const Kernels* chosen_of(const Kernels* generic, const Kernels* avx2, const Kernels* avx512) {
  const std::string instructions = at::get_cpu_capability();
  if (instructions == "AVX512") return avx512;
  if (instructions == "AVX2") return avx2;
  return generic;
}

}  // namespace

const ConvReluPoolKernels& conv_relu_pool_kernels() {
  static const auto* const chosen = chosen_of(&conv_relu_pool_generic, &conv_relu_pool_avx2, &conv_relu_pool_avx512);
  return *chosen;
}

const BatchNormReluKernels& batch_norm_relu_kernels() {
  static const auto* const chosen = chosen_of(&batch_norm_relu_generic, &batch_norm_relu_avx2, &batch_norm_relu_avx512);
  return *chosen;
}

const MatrixKernels& matrix_kernels() {
  static const auto* const chosen = chosen_of(&matrices_generic, &matrices_avx2, &matrices_avx512);
  return *chosen;
}

const WinogradKernels* winograd_kernels() {
  static const auto* const chosen = chosen_of<WinogradKernels>(nullptr, &winograd_avx2, &winograd_avx512);
  return chosen;
}

}  // namespace lockstep::kernels
