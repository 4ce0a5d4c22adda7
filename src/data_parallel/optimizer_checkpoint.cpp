#include <torch/optim/optimizer.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/optimizer_checkpoint.hpp>
#include <lockstep/data_parallel/sharded_optimizer.hpp>

#include "base/classic.hpp"
#include "io/checked_tensors.hpp"
#include "optim/optimizer_state.hpp"
#include "ranks/trained_parameters.hpp"

#include <set>

namespace lockstep {
namespace {

io::NamedTensors parameters_in(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer) {
  io::NamedTensors parameters = lockstep::parameters_of(module);
  std::set<const c10::TensorImpl*> known;
  for (const auto& [name, parameter] : parameters) known.insert(parameter.unsafeGetTensorImpl());
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      if (known.contains(parameter.unsafeGetTensorImpl())) continue;
      throw Error("the optimizer has a parameter of shape " + classic_text(parameter.sizes()) +
                  " that is none of this module's; give the module whose parameters() it was made of");
    }
  }
  return parameters;
}

}  // namespace

void save_optimizer(const std::filesystem::path& file, const torch::optim::Optimizer& optimizer,
                    const torch::nn::Module& module) {
  io::write_checked(file, optimizer_state(optimizer, parameters_in(module, optimizer)), {});
}

void load_optimizer(const std::filesystem::path& file, torch::optim::Optimizer& optimizer,
                    const torch::nn::Module& module) {
  io::load_checked(file, [&](const io::NamedTensors& state) {
    load_optimizer_state(optimizer, parameters_in(module, optimizer), state);
  });
}

void save_optimizer(const std::filesystem::path& file, ShardedOptimizer& optimizer) {
  const io::NamedTensors state = optimizer.state();
  if (optimizer.replica()->rank().index() == 0) io::write_checked(file, state, {});
}

void load_optimizer(const std::filesystem::path& file, ShardedOptimizer& optimizer) {
  io::load_checked(file, [&](const io::NamedTensors& state) { optimizer.load_state(state); });
}

}  // namespace lockstep
