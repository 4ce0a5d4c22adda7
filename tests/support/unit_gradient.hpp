// A net whose weight's gradient of a batch's mean is 1, for tests of how the parts of a batch are weighed.
#pragma once

#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>

#include <cstdint>

namespace lockstep {

// The gradient is 1 on samples of ones.
struct UnitGradient : torch::nn::Module {
  at::Tensor w = register_parameter("w", torch::zeros({1}, torch::kDouble));
  at::Tensor forward(const at::Tensor& x) { return x * w; }
};

inline Criterion mean_in(torch::ScalarType type) {
  return {[type](const at::Tensor& y_hat, const at::Tensor&) { return y_hat.mean().to(type); }};
}

inline Dataset ones_of(int64_t samples) {
  return {torch::ones({samples, 1}, torch::kDouble), torch::zeros({samples}, torch::kLong)};
}

}  // namespace lockstep
