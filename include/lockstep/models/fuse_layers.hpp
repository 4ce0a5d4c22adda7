// fuse_layers: puts layers that compute faster in the place of LibTorch's own, in a net that you made.
//
//   torch::nn::Sequential layers(torch::nn::Linear(784, 512), torch::nn::ReLU(), torch::nn::Linear(512, 10));
//   lockstep::fuse_layers(*layers);
//   lockstep::DataParallel net(layers, rank);
//
// A net computes what it computed, but for rounding, and has the same names and tensors, so files of one fit the other.
// On CPUs the new layers call lockstep's kernels (docs/decisions/0079-plain-modules.md). On a GPU each Linear and ReLU
// take one kernel less forward (docs/decisions/0008-cuda-graph.md). Thread-safe for different nets.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>

namespace lockstep {

// Replaces these layers of each torch::nn::Sequential, however deep in `net`. What comes after + becomes an Identity:
//   Linear; Linear + ReLU (the Linear has a bias, and may be a FastLinear)
//   Conv2d; Conv2d + ReLU + AvgPool2d of 2 x 2, for fewer than 64 channels, stride 1 and no padding
//   BatchNorm2d + ReLU
// Returns the number of Linear + ReLU. Convolutions of 3 x 3 and BatchNorms gain if the net is channels-last
// (set_memory_format()). Call it before you make the DataParallel, and after convert_sync_batchnorm(). The new layers
// take over the tensors, not copies, so optimizers stay valid. But types differ: `at<torch::nn::LinearImpl>()` finds no
// Linear there any more, and channels cannot be split: do not use it for a SplitModel whose mesh has a tensor axis. It
// does not look into a forward of your own; there FastKernels helps.
int64_t fuse_layers(torch::nn::Module& net);

// Computes relu(x * weight^T + bias) in one kernel: on a CUDA GPU where cuBLASLt can, and on the CPU where
// fast_linear() does not take LibTorch's. Can be differentiated, also twice.
//   x       [..., in]
//   weight  [out, in]
//   bias    [out]
//   returns [..., out]
at::Tensor linear_relu(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

}  // namespace lockstep
