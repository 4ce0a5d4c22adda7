#include "gathered.hpp"

#include <utility>

namespace lockstep {

at::Tensor Activation::gathered(const at::Tensor& x, Rank& rank) const {
  if (!in_slices) return x;
  return gather_from_group(x, dim, rank, total > 0 ? total : x.size(dim) * rank.world_size());
}

GatheredImpl::GatheredImpl(torch::nn::AnyModule layer, const Activation& input, const Activation& output,
                           const Rank& rank)
    : layer_(std::move(layer)), input_(input), output_(output), rank_(rank) {
  const auto module = layer_.ptr();
  for (auto& item : module->named_parameters(/*recurse=*/false)) {
    register_parameter(item.key(), item.value(), item.value().requires_grad());
  }
  for (auto& item : module->named_buffers(/*recurse=*/false)) register_buffer(item.key(), item.value());
  for (auto& item : module->named_children()) register_module(item.key(), item.value());
  if (const auto* sliced = dynamic_cast<const Sliced*>(module.get())) dimensions_ = sliced->sliced_dimensions();
  train(module->is_training());
}

at::Tensor GatheredImpl::forward(const at::Tensor& x) {
  return output_.gathered(layer_.forward(input_.gathered(x, rank_)), rank_);
}

void GatheredImpl::train(bool on) {
  Module::train(on);
  layer_.ptr()->train(on);
}

}  // namespace lockstep
