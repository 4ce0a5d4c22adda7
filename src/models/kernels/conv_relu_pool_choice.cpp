#include "conv_relu_pool.hpp"

namespace lockstep::kernels {

extern const ConvReluPoolKernels conv_relu_pool_generic;

const ConvReluPoolKernels& conv_relu_pool_kernels() {
  return conv_relu_pool_generic;
}

}  // namespace lockstep::kernels
