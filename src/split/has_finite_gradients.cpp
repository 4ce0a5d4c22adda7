#include <c10/core/GradMode.h>
#include <lockstep/split/has_finite_gradients.hpp>

#include "averaged_gradients.hpp"
#include "optim/finite_sum.hpp"

#include <cmath>
#include <vector>

namespace lockstep {
namespace {

bool finite_on_all(Replica& replica, const std::vector<Rank*>& axes) {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> pieces;
  for (const auto& [name, piece] : averaged_gradients_of(replica).pieces) pieces.push_back(piece);
  const at::Tensor sum = finite_sum(pieces, replica.rank().device());
  for (Rank* axis : axes) {
    if (axis->world_size() > 1) axis->allreduce(sum);
  }
  return std::isfinite(sum.item<double>());
}

}  // namespace

bool has_finite_gradients(Replica& replica) {
  return finite_on_all(replica, {&replica.rank()});
}

bool has_finite_gradients(ShardedOptimizer& optimizer) {
  return has_finite_gradients(*optimizer.replica());
}

bool has_finite_gradients(SplitModel& net) {
  Mesh& mesh = net.mesh();
  return finite_on_all(*net.replicas().replica(), {&mesh.data(), &mesh.tensor(), &mesh.pipeline()});
}

}  // namespace lockstep
