// fuse_layers: puts layers that need fewer kernels on a GPU in the place of LibTorch's own, in a net that you made.
//
//   torch::nn::Sequential net(torch::nn::Linear(784, 512), torch::nn::ReLU(), torch::nn::Linear(512, 10));
//   lockstep::fuse_layers(*net);
//
// A net computes what it computed, but for rounding, and has the same names and parameters, so files of one fit the
// other. A kernel less in each forward counts where kernels are short: a recorded step of an MLP on an H200 has some 60
// of 2 to 5 us (docs/decisions/0008-cuda-graph.md says what was not fused, and why). Thread-safe for different nets.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>

namespace lockstep {

// Fuses each torch::nn::Linear (or FastLinear) with a bias that a torch::nn::ReLU follows in a torch::nn::Sequential,
// however deep in `net`. The ReLU becomes an Identity. Returns the number of fused pairs. The new layer takes over the
// parameters, not copies, so optimizers stay valid. But `at<torch::nn::LinearImpl>()` finds no Linear there any more,
// and channels are not split: do not use it for a net whose Split has a tensor axis. A forward of your own may call
// linear_relu().
int64_t fuse_layers(torch::nn::Module& net);

// Computes relu(x * weight^T + bias). On a GPU the product's kernel does all of it. Can be differentiated, also twice.
//   x       [..., in]
//   weight  [out, in]
//   bias    [out]
//   returns [..., out]
at::Tensor linear_relu(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

}  // namespace lockstep
