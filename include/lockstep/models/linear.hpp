// fast_linear: computes x * weight^T + bias as torch::linear, by oneDNN's kernels where they are faster. FastLinear is
// the layer.
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

// Maps x [..., in] to [..., out], by a weight [out, in] and a bias [out] or none. Takes oneDNN for float32 on AMD CPUs
// with AVX-512, but not under autocast; otherwise it is torch::linear. Turn oneDNN off by ATEN_CPU_CAPABILITY=avx2, or
// by at::globalContext().setUserEnabledMkldnn(false). With one intra-op thread oneDNN's micro-kernel computes products
// of few rows. A backward by grains adds the weight's gradient straight to the grains' sum.
at::Tensor fast_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {});

// This torch::nn::Linear computes with fast_linear(). shard() and plans treat it as a torch::nn::Linear.
class FastLinearImpl : public torch::nn::LinearImpl {
 public:
  using torch::nn::LinearImpl::LinearImpl;
  at::Tensor forward(const at::Tensor& x) { return fast_linear(x, weight, bias); }
  std::shared_ptr<torch::nn::Module> clone(const std::optional<torch::Device>& device = std::nullopt) const override;
};
TORCH_MODULE(FastLinear);

}  // namespace lockstep
