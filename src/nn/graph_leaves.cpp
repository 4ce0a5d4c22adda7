#include "graph_leaves.hpp"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>
#include <vector>

namespace lockstep {

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

}  // namespace lockstep
