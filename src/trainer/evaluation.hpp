// Makes the forward of a run's network for evaluate().
#pragma once

#include <lockstep/data/data.hpp>
#include <lockstep/devices/autocast.hpp>
#include <lockstep/trainer/train_options.hpp>

#include "train_options.hpp"

#include <functional>
#include <utility>

namespace lockstep {

using ForwardOfBatch = std::function<at::Tensor(const Batch& batch)>;

// Gives `forward` in the options' precision and memory format. Outputs of half precision become float32, for the loss
// of a whole batch.
inline ForwardOfBatch evaluation_forward(const TrainOptions& options, const c10::Device& device,
                                         ForwardOfBatch forward) {
  return [device, forward = std::move(forward), bf16 = computes_in_bf16(options),
          format = memory_format(options)](const Batch& batch) {
    const Autocast precision(device, at::kBFloat16, bf16);
    Batch formatted = batch;
    formatted.x = batch.x.contiguous(format);
    const at::Tensor y_hat = forward(formatted);
    return bf16 ? y_hat.to(at::kFloat) : y_hat;
  };
}

}  // namespace lockstep
