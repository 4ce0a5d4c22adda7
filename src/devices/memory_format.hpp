// Memory formats: whether images and convolutions' weights lie channel by channel or pixel by pixel.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace lockstep {

// Gives the module's tensors of four dimensions (weights of 2-d convolutions) the format; values and shapes stay.
// Before a DataParallel or an optimizer is made of it. Activations follow if the input has the format too. (In Python:
// module.to(memory_format=…), which LibTorch's C++ modules lack.)
void set_memory_format(torch::nn::Module& module, at::MemoryFormat format);

}  // namespace lockstep
