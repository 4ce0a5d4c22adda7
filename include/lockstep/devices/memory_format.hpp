// Sets memory formats: images and convolutions' weights lie either channel by channel or pixel by pixel.
//
// Thread-safe for different modules. Cost: a copy of each tensor whose format changes.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace lockstep {

// Gives the module's tensors of four dimensions (weights of 2-d convolutions) the format. Values and shapes stay. Call
// it before you make a DataParallel or an optimizer of the module. Activations follow if the input has the format too.
// (Python has module.to(memory_format=…), which LibTorch's C++ modules lack.)
void set_memory_format(torch::nn::Module& module, at::MemoryFormat format);

}  // namespace lockstep
