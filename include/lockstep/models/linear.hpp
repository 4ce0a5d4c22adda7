// fast_linear: computes x * weight^T + bias as torch::linear, by AMX, or by oneDNN's micro-kernel where that
// pays. FastLinear is the layer.
//
// Intel's CPUs with AMX take it from 64 rows on (docs/decisions/0083-amx.md). On other CPUs with AVX-512 a measurement,
// made once per machine, decides between the micro-kernel and LibTorch's products (0080-micro-kernel.md). Results are
// LibTorch's but for rounding. Thread-safe for different layers.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>

namespace lockstep {

// Maps x [..., in] to [..., out], by a weight [out, in] and a bias [out] or none. AMX and the micro-kernel take float32
// on the CPU, from 16 to 4,096 rows and up to 1,024 features. Where a measurement finds 1.8 times the speed of
// LibTorch's products, as on AMD's Zen 5, the micro-kernel takes 262,144 features and 1,048,576 rows. Under autocast,
// and for all else, this is torch::linear. By AMX infinite numbers and those above 3.39e38 give NaN, and those below
// 1e-31 lose bits. ONEDNN_MAX_CPU_ISA=AVX512_CORE turns AMX off, ATEN_CPU_CAPABILITY=avx2 turns off both, and so does
// at::globalContext().setUserEnabledMkldnn(false). Bits do not depend on the number of intra-op threads. A backward by
// grains adds the weight's gradient straight to the grains' sum.
at::Tensor fast_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {});

// This torch::nn::Linear computes with fast_linear(). shard() and plans treat it as a torch::nn::Linear.
class FastLinearImpl : public torch::nn::LinearImpl {
 public:
  using torch::nn::LinearImpl::LinearImpl;
  explicit FastLinearImpl(const torch::nn::LinearImpl& layer) : LinearImpl(layer) {}  // shares its parameters
  at::Tensor forward(const at::Tensor& x) { return fast_linear(x, weight, bias); }
  std::shared_ptr<torch::nn::Module> clone(const std::optional<torch::Device>& device = std::nullopt) const override;
};
TORCH_MODULE(FastLinear);

}  // namespace lockstep
