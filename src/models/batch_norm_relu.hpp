// batch_norm_relu: a BatchNorm2d, the addition of a short cut, and ReLU, in as few passes over memory as there can be.
//
// LibTorch's operators read or write 17 times as many values as x has, forward and backward; this takes 11. Without a
// short cut it is 8 instead of 14. In training, float32 in the CPU's memory in channels-last takes lockstep's kernels;
// anything else takes the operators.
// Deterministic: the bits depend on the values and shapes, and not on the number of intra-op threads. Used by one
// thread at a time per module, whose running statistics it moves. Memory until backward: x, and y with a short cut.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/batchnorm.h>

namespace lockstep {

// relu(norm(x) + shortcut), which can be differentiated, also twice (Ioffe and Szegedy 2015, algorithm 1).
//   x         [n, channels, height, width]
//   shortcut  of x's shape, or undefined: nothing is added
// Moves the running statistics as norm(x) does. Throws what LibTorch's operators throw.
at::Tensor batch_norm_relu(torch::nn::BatchNorm2dImpl& norm, const at::Tensor& x, const at::Tensor& shortcut = {});

// The same after a norm of any kind, by LibTorch's operators: relu(y + shortcut). May change y, whose values no
// backward may need, as with a norm's result.
at::Tensor add_and_relu(const at::Tensor& y, const at::Tensor& shortcut);

}  // namespace lockstep
