// fuse_layers: puts layers that need fewer kernels on a GPU in the place of LibTorch's own, in a net that you made.
//
//   torch::nn::Sequential layers(torch::nn::Linear(784, 512), torch::nn::ReLU(), torch::nn::Linear(512, 10));
//   lockstep::fuse_layers(*layers);
//   lockstep::DataParallel net(layers, rank);
//
// A net computes what it computed, but for rounding, and has the same names and parameters, so files of one fit the
// other. It saves one kernel in each forward, which counts where kernels are short, as in an MLP's recorded step. What
// was not fused, and why: docs/decisions/0008-cuda-graph.md. Thread-safe for different nets.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>

namespace lockstep {

// Fuses each torch::nn::Linear (or FastLinear) with a bias that a torch::nn::ReLU follows in a torch::nn::Sequential,
// however deep in `net`. The ReLU becomes an Identity. Returns the number of fused pairs. Call it before you make the
// DataParallel. The new layer takes over the parameters, not copies, so optimizers stay valid. But
// `at<torch::nn::LinearImpl>()` finds no Linear there any more, and channels cannot be split: do not use it for a
// SplitModel whose mesh has a tensor axis. It does not look into a forward of your own, which may call linear_relu().
int64_t fuse_layers(torch::nn::Module& net);

// Computes relu(x * weight^T + bias). On a CUDA GPU the product's kernel does all of it, where cuBLASLt can. Can be
// differentiated, also twice.
//   x       [..., in]
//   weight  [out, in]
//   bias    [out]
//   returns [..., out]
at::Tensor linear_relu(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

}  // namespace lockstep
