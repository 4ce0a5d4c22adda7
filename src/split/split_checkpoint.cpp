#include <lockstep/split/split_checkpoint.hpp>

#include "io/checked_tensors.hpp"
#include "split_optimizer_state.hpp"

namespace lockstep {

void save_optimizer(const std::filesystem::path& file, const torch::optim::Optimizer& optimizer, SplitModel& net) {
  const io::NamedTensors state = whole_optimizer_state(optimizer, net);
  Mesh& mesh = net.mesh();
  const bool is_rank_0 = mesh.data().index() == 0 && mesh.pipeline().index() == 0 && mesh.tensor().index() == 0;
  if (is_rank_0) io::write_checked(file, state, {});
}

void load_optimizer(const std::filesystem::path& file, torch::optim::Optimizer& optimizer, SplitModel& net) {
  io::load_checked(file, [&](const io::NamedTensors& state) { load_whole_optimizer_state(optimizer, net, state); });
}

}  // namespace lockstep
