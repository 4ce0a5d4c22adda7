#include "weighed_backward.hpp"

#include <ATen/ScalarOps.h>
#include <ATen/ops/full_like.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include "nn/factors_scope.hpp"

#include <memory>
#include <set>

namespace lockstep {
namespace {

class Weigh : public torch::autograd::FunctionPreHook {
 public:
  explicit Weigh(double weight) : weight_(weight) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    torch::autograd::variable_list weighed;
    for (const auto& gradient : gradients) weighed.push_back(gradient.defined() ? gradient * weight_ : gradient);
    return weighed;
  }

 private:
  const double weight_;
};

bool holds(at::ScalarType type, double weight) {
  if (type == at::kHalf) return static_cast<double>(static_cast<at::Half>(static_cast<float>(weight))) == weight;
  if (type == at::kBFloat16) {
    return static_cast<double>(static_cast<at::BFloat16>(static_cast<float>(weight))) == weight;
  }
  return true;
}

// On the CPU it takes the way past the dispatcher that LibTorch has for single numbers: a small net's step notices.
at::Tensor seed_like(const at::Tensor& loss, double weight) {
  return loss.is_cpu() && loss.dim() == 0 ? at::detail::scalar_tensor_static(weight, loss.scalar_type(), at::kCPU)
                                          : at::full_like(loss, weight);
}

}  // namespace

WeighedBackward::WeighedBackward(const at::Tensor& loss, double weight, const torch::nn::Module& module) {
  if (!holds(loss.scalar_type(), weight)) rest_ = weight;
  seed_ = seed_like(loss, rest_ ? 1 : weight);
  if (!rest_) return;
  // Takes the module's parameters too: the graph lacks what backward computes again (activation checkpointing).
  std::set<Accumulator> leaves;
  for (const auto& parameter : module.parameters()) {
    if (parameter.requires_grad()) leaves.insert(torch::autograd::impl::grad_accumulator(parameter));
  }
  for (const auto& [leaf, uses] : uses_in_graph(loss)) {
    auto* const impl = const_cast<at::TensorImpl*>(leaf);
    const at::Tensor tensor(c10::intrusive_ptr<at::TensorImpl>::unsafe_reclaim_from_nonowning(impl));
    leaves.insert(torch::autograd::impl::grad_accumulator(tensor));
  }
  // Hooks the nodes, not the tensors: a tensor's hooks run for torch::autograd::grad() within backward as well.
  for (const auto& leaf : leaves) {
    auto hook = std::make_unique<Weigh>(*rest_);
    hooks_.emplace_back(leaf, hook.get());
    leaf->add_pre_hook(std::move(hook));
  }
}

WeighedBackward::~WeighedBackward() {
  for (const auto& [leaf, mine] : hooks_) {
    std::erase_if(leaf->pre_hooks(), [mine = mine](const auto& hook) { return hook.get() == mine; });
  }
}

}  // namespace lockstep
