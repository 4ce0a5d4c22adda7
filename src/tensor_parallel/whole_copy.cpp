#include "layer_slices.hpp"

#include <c10/core/GradMode.h>
#include <lockstep/tensor_parallel/parallel_layers.hpp>

namespace lockstep {

void take_over_flags(const torch::nn::Module& from, torch::nn::Module& to) {
  auto parameters = to.named_parameters();
  for (const auto& item : from.named_parameters()) {
    parameters[item.key()].requires_grad_(item.value().requires_grad());
  }
  to.train(from.is_training());
}

std::shared_ptr<torch::nn::Module> whole_copy(const torch::nn::Module& layer, const Rank& rank) {
  const c10::AutoGradMode no_grad(false);
  auto copy = layer.clone(rank.device());
  take_over_flags(layer, *copy);
  return copy;
}

}  // namespace lockstep
