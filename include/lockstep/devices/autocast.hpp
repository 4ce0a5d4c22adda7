// Autocast: computes one scope of one thread in automatic mixed precision, like Python's torch.autocast.
//
// LibTorch has the machinery (ATen/autocast_mode.h), but no guard for it. While an enabled Autocast lives, operations
// that gain from it (convolutions, matrix products) read float32 tensors as `type`. Operations that need the range
// (losses, softmax, norms) compute in float32. Parameters and gradients keep their type. float64 tensors are left
// alone, so a float64 model gains nothing. Put forward and the loss into the scope, and backward outside of it:
//
//   lockstep::Loss loss = [&] {
//     const lockstep::Autocast bf16(rank.device());
//     return net.loss(batch, torch::nn::functional::cross_entropy);
//   }();
//   loss.backward();
//
// bfloat16 has float32's range, so no loss scaling is needed. An Autocast acts on its thread only, hence on one rank.
// Scopes nest. Cost: the casts; each weight is cast once per outermost scope.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

namespace lockstep {

class [[nodiscard]] Autocast {
 public:
  // Acts on operations on devices of `device`'s type. With enabled = false, operations inside compute as if there were
  // no Autocast around. `type` is bfloat16 or float16. (float16's gradients need a LossScaler.)
  explicit Autocast(const c10::Device& device, c10::ScalarType type = c10::ScalarType::BFloat16, bool enabled = true);
  ~Autocast();
  Autocast& operator=(Autocast&&) = delete;

 private:
  const c10::DeviceType device_type_;
  const bool enabled_before_;
  const c10::ScalarType type_before_;
};

}  // namespace lockstep
