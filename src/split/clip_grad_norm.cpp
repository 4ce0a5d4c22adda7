#include <ATen/ops/norm.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>
#include <lockstep/split/clip_grad_norm.hpp>
#include <lockstep/tensor_parallel/tensor_parallel.hpp>

#include "data_parallel/averaging.hpp"
#include "ranks/trained_parameters.hpp"
#include "tensor_parallel/sliced_dimensions.hpp"

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {
namespace {

using at::Tensor;
// Says whether this rank's values of a parameter count. If several ranks hold the parameter, only one counts.
using Counts = std::function<bool(const std::string& name)>;

// This rank's averaged gradients: all of them, or with a ShardedOptimizer its slices.
struct Gradients {
  std::vector<std::pair<std::string, Tensor>> pieces;
  bool in_slices = false;
};

Gradients averaged_gradients_of(Replica& replica) {
  auto* const averaging = replica.averaging();
  if (averaging != nullptr && averaging->in_slices()) return {averaging->slices(), /*in_slices=*/true};
  Gradients gradients;
  for (const auto& [name, parameter] : parameters_of(replica.module())) {
    if (parameter.grad().defined()) gradients.pieces.emplace_back(name, parameter.grad());
  }
  return gradients;
}

Tensor sum_of_squares(const Gradients& gradients, const Counts& counts, Rank& rank) {
  Tensor sum = at::zeros({}, at::TensorOptions(rank.device()).dtype(at::kDouble));
  for (const auto& [name, piece] : gradients.pieces) {
    if (counts(name)) sum.add_(at::norm(piece, 2, at::kDouble).square());
  }
  if (gradients.in_slices) rank.allreduce(sum);
  return sum;
}

// Computes the factor as LibTorch does, without asking the device whether it is needed.
Tensor scaled_down(const Gradients& gradients, const Tensor& sum_of_squares, double max_norm) {
  const Tensor norm = sum_of_squares.sqrt();
  const Tensor factor = (max_norm / (norm + 1e-6)).clamp_max(1.0);
  for (const auto& piece : gradients.pieces) piece.second.mul_(factor.to(piece.second.scalar_type()));
  return norm;
}

void check_max_norm(double max_norm, const Rank& rank) {
  if (max_norm > 0) return;
  throw Error(rank.name() + ": clip_grad_norm: the largest norm is " + std::to_string(max_norm) +
              "; it must be above 0");
}

}  // namespace

Tensor clip_grad_norm(Replica& replica, double max_norm) {
  const c10::NoGradGuard no_grad;
  Rank& rank = replica.rank();
  check_max_norm(max_norm, rank);
  const Gradients gradients = averaged_gradients_of(replica);
  return scaled_down(gradients,
                     sum_of_squares(
                         gradients, [](const auto&) { return true; }, rank),
                     max_norm);
}

Tensor clip_grad_norm(ShardedOptimizer& optimizer, double max_norm) {
  return clip_grad_norm(*optimizer.replica(), max_norm);
}

// Stages lie on the pipeline's ranks, and slices of layers on the tensor axis; what that axis holds whole counts once.
Tensor clip_grad_norm(SplitModel& net, double max_norm) {
  const c10::NoGradGuard no_grad;
  Replica& replica = *net.replicas().replica();
  Mesh& mesh = net.mesh();
  check_max_norm(max_norm, replica.rank());
  const auto dimensions = sliced_dimensions_of(net.module());
  const bool first = mesh.tensor().index() == 0;
  const Gradients gradients = averaged_gradients_of(replica);
  const Tensor sum = sum_of_squares(
      gradients, [&](const std::string& name) { return first || dimensions.contains(name); }, replica.rank());
  if (mesh.tensor().world_size() > 1) mesh.tensor().allreduce(sum);
  if (mesh.pipeline().world_size() > 1) mesh.pipeline().allreduce(sum);
  return scaled_down(gradients, sum, max_norm);
}

}  // namespace lockstep
