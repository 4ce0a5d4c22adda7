#include "factors_scope.hpp"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>
#include <utility>

namespace lockstep {
namespace {

thread_local FactorsScope* innermost_factors_scope = nullptr;

bool is_seen_by_others(const at::Tensor& parameter) {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();  // not empty within torch::autograd::grad()
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  return (wanted && !wanted->empty()) || (accumulator && !accumulator->pre_hooks().empty()) ||
         !torch::autograd::impl::hooks(parameter).empty() || torch::autograd::impl::post_acc_grad_hooks(parameter);
}

}  // namespace

GraphUses uses_in_graph(const at::Tensor& root) {
  using torch::autograd::Node;
  GraphUses uses;
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> open{root.grad_fn().get()};
  while (!open.empty()) {
    const Node* const node = open.back();
    open.pop_back();
    if (node == nullptr || !seen.insert(node).second) continue;
    for (const auto& edge : node->next_edges()) {
      const auto* const leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(edge.function.get());
      if (leaf != nullptr) {
        ++uses[leaf->variable.unsafeGetTensorImpl()];
      } else {
        open.push_back(edge.function.get());
      }
    }
  }
  return uses;
}

FactorsScope::FactorsScope(at::Tensor root, Take take)
    : root_(std::move(root)), take_(std::move(take)), before_(innermost_factors_scope) {
  innermost_factors_scope = this;
}

FactorsScope::~FactorsScope() {
  innermost_factors_scope = before_;
}

bool FactorsScope::take(const at::Tensor& parameter, const GradientFactors& factors) {
  FactorsScope* const scope = innermost_factors_scope;
  if (scope == nullptr || is_seen_by_others(parameter)) return false;
  if (!scope->uses_) scope->uses_ = uses_in_graph(scope->root_);
  const auto uses = scope->uses_->find(parameter.unsafeGetTensorImpl());
  return uses != scope->uses_->end() && uses->second == 1 && scope->take_(parameter, factors);
}

}  // namespace lockstep
