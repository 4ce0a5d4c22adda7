// fast_linear: x * weight^T + bias as torch::linear, by oneDNN's kernels where they are faster; and FastLinear, the
// layer.
//
// LibTorch's linear() takes MKL for float32, which on AMD's CPUs does not use AVX-512: on an AMD EPYC of Zen 5 oneDNN
// computes more than twice as fast (docs/decisions/0034). Results are LibTorch's but for rounding. Thread-safe for
// different layers.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>

namespace lockstep {

// [..., in] with a weight [out, in] and a bias [out], or none -> [..., out]. Takes oneDNN for float32 on an AMD CPU
// with AVX-512 (ATEN_CPU_CAPABILITY=avx2 turns that off, and at::globalContext().setUserEnabledMkldnn(false)), and not
// under autocast; else it is torch::linear. Products of few rows on one thread are computed by oneDNN's micro-kernel.
// During a backward by grains the weight's gradient goes straight into the sum over the grains.
at::Tensor fast_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {});

// torch::nn::Linear that computes with fast_linear(). shard() and plans take it for a torch::nn::Linear.
class FastLinearImpl : public torch::nn::LinearImpl {
 public:
  using torch::nn::LinearImpl::LinearImpl;
  at::Tensor forward(const at::Tensor& x) { return fast_linear(x, weight, bias); }
  std::shared_ptr<torch::nn::Module> clone(const std::optional<torch::Device>& device = std::nullopt) const override;
};
TORCH_MODULE(FastLinear);

}  // namespace lockstep
