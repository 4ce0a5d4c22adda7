#include "update.hpp"

#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>
#include <lockstep/base/error.hpp>
#include <lockstep/lab/optimizers.hpp>

#include "data_parallel/hidden_gradients.hpp"
#include "data_parallel/replica_check.hpp"
#include "flat_options.hpp"
#include "optim/optimizer_state.hpp"
#include "ranks/trained_parameters.hpp"
#include "train_options.hpp"

#include <map>
#include <string>

namespace lockstep {
namespace {

Optimizer::Make make_of(const TrainOptions& options, const Task& task) {
  if (task.optimizer) return task.optimizer;
  return [&options](const Task::Groups& groups) {
    return make_optimizer(options.optimizer.kind, groups, optimizer_settings(options));
  };
}

Optimizer::Grouping grouping_of(const Task& task, const torch::nn::Module* module) {
  if (!task.groups || module == nullptr) return task.groups;
  return [&task, module](const torch::nn::Module&) { return task.groups(*module); };
}

}  // namespace

Update::Update(const TrainOptions& options, const SplitModel& net, const Task& task, const torch::nn::Module* module)
    : net_(net),
      clip_(options.optimizer.clip),
      in_place_(options.cuda_graph || flat(options).local.sync_every > 0 ||
                net_.mesh().shape().size() != net_.mesh().shape().data),
      is_only_replica_(net_.mesh().data().world_size() == 1),
      rate_(learning_rate_of(options)),
      optimizer_(net_.trained(), make_of(options, task), grouping_of(task, module), "fit") {
  if (task.ema_decay > 0) average_.emplace(net_, task.ema_decay);
  optimizer_.compare_options();  // the ranks' options may differ with a Task's own optimizer
  const auto* const local = std::get_if<LocalSgdOptions>(&options.way);
  if (local == nullptr) return;
  const std::vector<at::Tensor> parameters = part()->module().parameters();
  local_.emplace(parameters, net_.mesh().data(), *local);
  // Zeros give every optimizer a state of every parameter, also on a rank that has had no samples yet.
  const HiddenGradients::Shown gradients(part()->hidden_gradients());
  for (const auto& parameter : parameters) parameter.mutable_grad() = at::zeros_like(parameter);
}

void Update::zero_grad(bool anew) {
  prepared_ = false;
  optimizer_.zero_grad(in_place_ && !anew);
}

double Update::set_time(double epochs_done) {
  const double lr = learning_rate_at(rate_, epochs_done);
  set_learning_rate(optimizer_.inner(), lr);
  return lr;
}

void Update::prepare() {
  if (clip_ > 0) optimizer_.clip(clip_);
  prepared_ = true;
}

void Update::step() {
  RECORD_USER_SCOPE("lockstep::update");
  if (!prepared_) prepare();
  prepared_ = false;
  optimizer_.update();
  if (local_) local_->step();
  if (average_) average_->add();
}

io::NamedTensors Update::replica() const {
  io::NamedTensors tensors =
      replica_of(part()->module(), local_ || optimizer_.sharded() ? nullptr : &optimizer_.inner());
  if (divides_parameters())  // these are gathered from the slices, right or wrong
    std::erase_if(tensors, [](const auto& named) { return named.second.requires_grad(); });
  if (local_) {
    for (const auto& momentum : local_->momentum())
      tensors.emplace_back("the outer momentum " + std::to_string(tensors.size()), momentum);
  }
  if (!average_ || divides_parameters()) return tensors;
  for (const auto& value : average_->values()) {
    tensors.emplace_back("average " + std::to_string(tensors.size()), value);
  }
  return tensors;
}

std::vector<WatchedTensor> Update::alone() const {
  std::vector<WatchedTensor> tensors = optimizer_.slices();
  if (local_ || is_only_replica_) {
    const auto parameters = parameters_of(part()->module());
    for (const auto& [name, parameter] : parameters) {
      if (!divides_parameters() || !parameter.requires_grad()) tensors.push_back(watched(name, parameter));
    }
    if (!optimizer_.sharded()) {
      for (const auto& [name, value] : optimizer_state(optimizer_.inner(), parameters))
        tensors.push_back(watched("the optimizer's " + name, value));
    }
  }
  if (!average_ || !(is_only_replica_ || divides_parameters())) return tensors;
  for (const auto& value : average_->values())
    tensors.push_back(watched("average " + std::to_string(tensors.size()), value));
  return tensors;
}

void Update::save(RunState& state, Rank& rank) {
  if (!local_) return put_under("optimizer", optimizer_.state(), state.tensors);
  const auto named = parameters();
  // Each rank has a state of its own.
  put_under("ranks.optimizer", tables_of_all_ranks(optimizer_state(optimizer_.inner(), named), rank), state.tensors);
  const auto momentum = local_->momentum();
  for (size_t i = 0; i < momentum.size(); ++i) state.tensors.emplace_back("outer." + named[i].first, momentum[i]);
}

void Update::load(const RunState& state, const Rank& rank) {
  if (local_) return load_of_ranks(state, rank);
  optimizer_.load_state(tensors_under("optimizer", state.tensors));
}

void Update::load_of_ranks(const RunState& state, const Rank& rank) {
  io::NamedTensors mine;
  for (const auto& [name, table] : tensors_under("ranks.optimizer", state.tensors)) {
    if (table.size(0) != rank.world_size()) {
      throw Error("cannot go on: with `sync_every` each rank's optimizer has a state of its own, and the run had " +
                      std::to_string(table.size(0)) + " ranks, this one has " + std::to_string(rank.world_size()) +
                      "; give as many `devices`",
                  {.options = {"devices"}});
    }
    mine.emplace_back(name, table[rank.index()]);
  }
  load_optimizer_state(optimizer_.inner(), parameters(), mine);
  const auto outer = tensors_under("outer", state.tensors);
  if (outer.empty()) return;
  const std::map<std::string, torch::Tensor> by_name(outer.begin(), outer.end());
  std::vector<torch::Tensor> momentum;
  for (const auto& [name, parameter] : parameters()) {
    const auto found = by_name.find(name);
    if (found == by_name.end())
      throw Error("cannot go on: the checkpoint has no outer momentum of " + name, {Error::file});
    momentum.push_back(found->second);
  }
  local_->set_momentum(momentum);
}

io::NamedTensors Update::parameters() const {
  io::NamedTensors parameters;
  for (const auto& item : part()->module().named_parameters()) parameters.emplace_back(item.key(), item.value());
  return parameters;
}

}  // namespace lockstep
