#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>
#include <lockstep/split/clip_grad_norm.hpp>
#include <lockstep/tensor_parallel/tensor_parallel.hpp>

#include "averaged_gradients.hpp"
#include "base/number_text.hpp"
#include "optim/reproducible_norm.hpp"
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

// The norm of all ranks' pieces that count. `spread_over` are the groups of ranks that have different ones.
Tensor norm_of_all(const AveragedGradients& gradients, const Counts& counts, const std::vector<Rank*>& spread_over,
                   const c10::Device& device) {
  std::vector<Tensor> pieces;
  for (const auto& [name, piece] : gradients.pieces) {
    if (counts(name)) pieces.push_back(piece);
  }
  const Tensor largest = largest_magnitude(pieces, device);
  for (Rank* rank : spread_over) rank->allreduce(largest, c10d::ReduceOp::MAX);
  const Tensor sums = sums_of_squares(pieces, largest);
  for (Rank* rank : spread_over) rank->allreduce(sums);
  return norm_of(sums, largest);
}

// Computes the factor as LibTorch does, without asking the device whether it is needed.
void scale_down(const AveragedGradients& gradients, const Tensor& norm, double max_norm) {
  const Tensor factor = (max_norm / (norm + 1e-6)).clamp_max(1.0);
  for (const auto& piece : gradients.pieces) piece.second.mul_(factor.to(piece.second.scalar_type()));
}

void check_max_norm(double max_norm, const Rank& rank) {
  if (max_norm > 0) return;
  throw Error(rank.name() + ": clip_grad_norm: the largest norm is " + number_text(max_norm) + "; it must be above 0");
}

}  // namespace

Tensor clip_grad_norm(Replica& replica, double max_norm) {
  const c10::NoGradGuard no_grad;
  Rank& rank = replica.rank();
  check_max_norm(max_norm, rank);
  const AveragedGradients gradients = averaged_gradients_of(replica);
  std::vector<Rank*> spread_over;
  if (gradients.in_slices) spread_over.push_back(&rank);
  const Tensor norm = norm_of_all(
      gradients, [](const auto&) { return true; }, spread_over, rank.device());
  scale_down(gradients, norm, max_norm);
  return norm;
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
  const AveragedGradients gradients = averaged_gradients_of(replica);
  std::vector<Rank*> spread_over;
  if (gradients.in_slices) spread_over.push_back(&replica.rank());
  for (Rank* axis : {&mesh.tensor(), &mesh.pipeline()}) {
    if (axis->world_size() > 1) spread_over.push_back(axis);
  }
  const Tensor norm = norm_of_all(
      gradients, [&](const std::string& name) { return first || dimensions.contains(name); }, spread_over,
      replica.rank().device());
  scale_down(gradients, norm, max_norm);
  net.note_gradients();
  return norm;
}

}  // namespace lockstep
