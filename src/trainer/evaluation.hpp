// The forward that evaluate() wants, of a run's network.
#pragma once

#include <lockstep/devices/autocast.hpp>
#include <lockstep/trainer/train_options.hpp>

#include "train_options.hpp"

#include <functional>
#include <utility>

namespace lockstep {

using Forward = std::function<at::Tensor(const at::Tensor& x)>;

// `forward` in the options' precision and memory format. Outputs of half precision become float32, for the loss of a
// whole batch.
inline Forward evaluation_forward(const TrainOptions& options, const c10::Device& device, Forward forward) {
  return [device, forward = std::move(forward), bf16 = computes_in_bf16(options),
          format = memory_format(options)](const at::Tensor& x) {
    const Autocast precision(device, at::kBFloat16, bf16);
    const at::Tensor y_hat = forward(x.contiguous(format));
    return bf16 ? y_hat.to(at::kFloat) : y_hat;
  };
}

}  // namespace lockstep
