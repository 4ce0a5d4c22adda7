#include "counted_targets.hpp"

#include <ATen/core/Reduction.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <lockstep/base/error.hpp>

#include <cmath>
#include <vector>

namespace lockstep {
namespace {

using torch::autograd::Node;

constexpr size_t kNodesSeen = 8;              // so many nodes cover a sum of a few losses, each with a factor
constexpr int64_t kExact = int64_t{1} << 24;  // float32 counts exactly up to here

void refuse_counted(double counted, int64_t targets, int64_t samples, const std::string& name, const std::string& how) {
  throw Error(name + ": the mean of the loss is over " + std::to_string(std::llround(counted)) + " of " +
              std::to_string(targets) + " targets (or their weights), and the part has " + std::to_string(samples) +
              " samples: the loss leaves out targets of ignore_index, weighs classes, or is of other ranks' outputs "
              "too, so that the average of the parts' means is not the whole batch's. " +
              how + ". A loss of all ranks' outputs goes to net.mean(loss, 1, rank.world_size())");
}

template <class Backward>
void check_node(Node* node, int64_t samples, const std::string& name, const std::string& how) {
  auto* const loss = dynamic_cast<Backward*>(node);
  if (loss == nullptr || loss->reduction != at::Reduction::Mean) return;
  const int64_t targets = loss->target_.unpack().numel();
  if (targets >= kExact) return;
  const at::Tensor weight = loss->total_weight_.unpack(loss->getptr());
  if (weight.element_size() < 4) return;  // bfloat16 and half round such counts
  const auto counted = weight.template item<double>();
  const auto nearest = std::llround(counted);
  const bool is_a_count = std::abs(counted - static_cast<double>(nearest)) < 0.01 && nearest > 0;
  if (!is_a_count || nearest % samples != 0) refuse_counted(counted, targets, samples, name, how);
}

}  // namespace

void check_counted_targets(const at::Tensor& mean, int64_t samples, const std::string& name, const std::string& how) {
  std::vector<Node*> nodes{mean.grad_fn().get()};
  for (size_t i = 0; i < nodes.size() && i < kNodesSeen; ++i) {
    if (nodes[i] == nullptr) continue;
    check_node<torch::autograd::generated::NllLossBackward0>(nodes[i], samples, name, how);
    check_node<torch::autograd::generated::NllLoss2DBackward0>(nodes[i], samples, name, how);
    for (const auto& edge : nodes[i]->next_edges()) nodes.push_back(edge.function.get());
  }
}

}  // namespace lockstep
