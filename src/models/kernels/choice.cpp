#include "batch_norm_relu.hpp"
#include "conv_relu_pool.hpp"
#include "matrices.hpp"
#include "winograd.hpp"

namespace lockstep::kernels {

extern const ConvReluPoolKernels conv_relu_pool_generic;
extern const BatchNormReluKernels batch_norm_relu_generic;
extern const MatrixKernels matrices_generic;

const ConvReluPoolKernels& conv_relu_pool_kernels() {
  return conv_relu_pool_generic;
}

const BatchNormReluKernels& batch_norm_relu_kernels() {
  return batch_norm_relu_generic;
}

const MatrixKernels& matrix_kernels() {
  return matrices_generic;
}

const WinogradKernels* winograd_kernels() {
  return nullptr;
}

}  // namespace lockstep::kernels
