#include "averaged_gradients.hpp"

#include <c10/core/GradMode.h>

#include "hidden_gradients.hpp"
#include "optim/finite_sum.hpp"
#include "optim/reproducible_norm.hpp"
#include "ranks/trained_parameters.hpp"
#include "sharded_net.hpp"

#include <cmath>

namespace lockstep {
namespace {

using at::Tensor;

// Gives the groups of ranks that have different gradients.
std::vector<Rank*> spread_over(TrainedNet& net) {
  std::vector<Rank*> groups;
  if (net.replica()->sharded()) groups.push_back(&net.replica()->rank());
  for (Rank* const group : net.other_parts()) groups.push_back(group);
  return groups;
}

}  // namespace

std::vector<std::pair<std::string, Tensor>> averaged_gradients_of(Replica& replica) {
  if (replica.sharded()) return replica.sharded()->reducer()->slices();
  const HiddenGradients::Shown shown(replica.hidden_gradients());
  std::vector<std::pair<std::string, Tensor>> gradients;
  for (const auto& [name, parameter] : parameters_of(replica.module())) {
    if (parameter.grad().defined()) gradients.emplace_back(name, parameter.grad());
  }
  return gradients;
}

// The factor is computed as LibTorch does, without asking the device whether it is needed.
Tensor clip_gradients(TrainedNet& net, double max_norm) {
  const c10::NoGradGuard no_grad;
  Replica& replica = *net.replica();
  const auto gradients = averaged_gradients_of(replica);
  const auto groups = spread_over(net);
  std::vector<Tensor> counted;
  for (const auto& [name, gradient] : gradients) {
    if (net.counts(name)) counted.push_back(gradient);
  }
  const Tensor largest = largest_magnitude(counted, replica.rank().device());
  for (Rank* const group : groups) group->allreduce(largest, c10d::ReduceOp::MAX);
  const Tensor sums = sums_of_squares(counted, largest);
  for (Rank* const group : groups) group->allreduce(sums);
  Tensor norm = norm_of(sums, largest);
  if (std::isinf(max_norm)) return norm;
  const Tensor factor = (max_norm / (norm + 1e-6)).clamp_max(1.0);
  for (const auto& [name, gradient] : gradients) gradient.mul_(factor.to(gradient.scalar_type()));
  return norm;
}

bool has_finite_gradients(TrainedNet& net) {
  const c10::NoGradGuard no_grad;
  Rank& rank = net.replica()->rank();
  std::vector<Tensor> gradients;
  for (const auto& [name, gradient] : averaged_gradients_of(*net.replica())) gradients.push_back(gradient);
  const Tensor sum = finite_sum(gradients, rank.device());
  if (rank.world_size() > 1) rank.allreduce(sum);
  for (Rank* const group : net.other_parts()) group->allreduce(sum);
  return std::isfinite(sum.item<double>());
}

}  // namespace lockstep
