// batch_norm_relu: computes a BatchNorm2d, the addition of a short cut, and ReLU in few passes over memory.
//
// LibTorch's operators read or write 17 times as many values as x has, forward and backward; this takes 11. Without a
// short cut it takes 8 instead of 14. In training, lockstep's kernels compute float32 in the CPU's memory in
// channels-last; the operators compute all else. Deterministic: the bits depend on the values and shapes, and not on
// the number of intra-op threads. Use a module from one thread at a time, since its running statistics move. Memory
// until backward: x, and y with a short cut.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/batchnorm.h>

namespace lockstep {

// Computes relu(norm(x) + shortcut), which can be differentiated, also twice (Ioffe and Szegedy 2015, algorithm 1).
//   x         [n, channels, height, width]
//   shortcut  x's shape, or undefined: nothing is added
// Moves the running statistics as norm(x) does. Throws as LibTorch's operators do.
at::Tensor batch_norm_relu(torch::nn::BatchNorm2dImpl& norm, const at::Tensor& x, const at::Tensor& shortcut = {});

// Computes relu(y + shortcut) after a norm of any kind, by LibTorch's operators. It may change y, so give a y whose
// values no backward needs, as a norm's result.
at::Tensor add_and_relu(const at::Tensor& y, const at::Tensor& shortcut);

}  // namespace lockstep
