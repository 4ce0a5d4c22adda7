#include "update.hpp"

#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>
#include <lockstep/optim/optimizers.hpp>
#include <lockstep/split/clip_grad_norm.hpp>

#include "data_parallel/replica_check.hpp"
#include "exchange_options.hpp"
#include "optim/finite_sum.hpp"
#include "optim/fused_optimizers.hpp"
#include "optim/made_optimizer.hpp"
#include "optim/optimizer_state.hpp"
#include "ranks/trained_parameters.hpp"
#include "train_options.hpp"

#include <string>
#include <utility>

namespace lockstep {
namespace {

ShardedOptimizer::GroupsFactory factory_of(const TrainOptions& options, const UpdateExtras& extras) {
  if (extras.optimizer) return extras.optimizer;
  return [&options](const Task::Groups& groups) {
    return make_optimizer(options.optimizer.kind, groups, optimizer_settings(options));
  };
}

Task::Groups groups_of(const UpdateExtras& extras, const SplitModel& net) {
  if (extras.groups) return extras.groups(extras.module != nullptr ? *extras.module : *net.module());
  std::vector<at::Tensor> all;
  for (const auto& [name, parameter] : parameters_of(*net.module())) all.push_back(parameter);
  Task::Groups one;
  one.emplace_back(std::move(all));
  return one;
}

std::unique_ptr<torch::optim::Optimizer> optimizer_of(const TrainOptions& options, const UpdateExtras& extras,
                                                      SplitModel& net) {
  if (options.exchange.zero_stage > 0) return nullptr;
  const std::string who = net.mesh().data().name() + ": fit";
  const auto groups = groups_of(extras, net);
  if (extras.groups) check_groups(groups, parameters_of(*net.module()), who);
  return checked_optimizer(factory_of(options, extras)(groups), tensors_in(groups), who, "parameters");
}

std::unique_ptr<ShardedOptimizer> sharded_of(const TrainOptions& options, const UpdateExtras& extras, SplitModel& net) {
  if (options.exchange.zero_stage == 0) return nullptr;
  return std::make_unique<ShardedOptimizer>(net.replicas(), groups_of(extras, net), factory_of(options, extras),
                                            ShardedOptions{.stage = options.exchange.zero_stage});
}

// With stage 3 a rank keeps slices of the weights, and of their average too.
std::vector<at::Tensor> averaged_tensors(const SplitModel& net, ShardedOptimizer* sharded, int zero_stage) {
  if (zero_stage < 3) return net.parameters();
  return tensors_in(sharded->optimizer().param_groups());
}

}  // namespace

Update::Update(const TrainOptions& options, const SplitModel& net, const UpdateExtras& extras)
    : net_(net),
      clip_(options.optimizer.clip),
      zero_stage_(options.exchange.zero_stage),
      in_place_(options.cuda_graph || options.exchange.sync_every > 0 ||
                net_.mesh().shape().size() != net_.mesh().shape().data),
      is_only_replica_(net_.mesh().data().world_size() == 1),
      rate_(learning_rate_of(options)),
      optimizer_(optimizer_of(options, extras, net_)),
      sharded_(sharded_of(options, extras, net_)) {
  if (extras.ema_decay > 0)
    average_.emplace(extras.ema_decay, averaged_tensors(net_, sharded_.get(), options.exchange.zero_stage));
  if (options.exchange.sync_every == 0) return;
  local_.emplace(net_.parameters(), net_.mesh().data(), local_sgd_options(options.exchange));
  // So that every optimizer has a state of every parameter, also of a rank that has had no samples yet.
  for (auto& parameter : net_.parameters()) parameter.mutable_grad() = at::zeros_like(parameter);
}

void Update::zero_grad() {
  prepared_ = false;
  if (sharded_) return sharded_->zero_grad();
  auto parameters = net_.parameters();
  if (in_place_) return zero_gradients(parameters);
  for (auto& parameter : parameters) parameter.mutable_grad().reset();
}

double Update::set_time(double epochs_done) {
  const double lr = learning_rate_at(rate_, epochs_done);
  set_learning_rate(sharded_ ? sharded_->optimizer() : *optimizer_, lr);
  return lr;
}

void Update::prepare() {
  if (clip_ > 0) clip_grad_norm(net_, clip_);
  prepared_ = true;
}

void Update::step() {
  RECORD_USER_SCOPE("lockstep::update");
  if (!prepared_) prepare();
  prepared_ = false;
  if (sharded_) {
    sharded_->step();
  } else {
    optimizer_->step();
  }
  if (local_) local_->step();
  if (average_) average_->add();
}

Update::Shown::Shown(Update& update) : update_(update) {
  if (update_.average_) update_.average_->exchange();
  whole_ = update_.whole();
}

Update::Shown::~Shown() {
  whole_ = nullptr;  // which takes over what the parameters hold
  if (update_.average_) update_.average_->exchange();
}

std::vector<at::Tensor> Update::gradients() const {
  return sharded_ ? sharded_->gradients() : gradients_of(net_.parameters());
}

io::NamedTensors Update::replica() const {
  io::NamedTensors tensors = replica_of(*net_.module(), local_ ? nullptr : optimizer_.get());
  if (zero_stage_ == 3)  // they are gathered from the slices, right or wrong
    std::erase_if(tensors, [](const auto& named) { return named.second.requires_grad(); });
  if (local_) {
    for (const auto& momentum : local_->momentum())
      tensors.emplace_back("the outer momentum " + std::to_string(tensors.size()), momentum);
  }
  if (!average_ || zero_stage_ == 3) return tensors;
  for (const auto& value : average_->values()) {
    tensors.emplace_back("average " + std::to_string(tensors.size()), value);
  }
  return tensors;
}

bool Update::has_some_alone() const {
  return sharded_ || local_ || is_only_replica_;
}

std::vector<WatchedTensor> Update::alone() const {
  std::vector<WatchedTensor> tensors = sharded_ ? slices_of_rank(*sharded_) : std::vector<WatchedTensor>();
  if (local_ || is_only_replica_) {
    const auto parameters = parameters_of(*net_.module());
    for (const auto& [name, parameter] : parameters) {
      if (zero_stage_ < 3 || !parameter.requires_grad()) tensors.push_back(watched(name, parameter));
    }
    if (optimizer_) {
      for (const auto& [name, value] : optimizer_state(*optimizer_, parameters))
        tensors.push_back(watched("the optimizer's " + name, value));
    }
  }
  if (!average_ || !(is_only_replica_ || zero_stage_ == 3)) return tensors;
  for (const auto& value : average_->values())
    tensors.push_back(watched("average " + std::to_string(tensors.size()), value));
  return tensors;
}

std::unique_ptr<ShardedOptimizer::Whole> Update::whole() {
  return sharded_ ? std::make_unique<ShardedOptimizer::Whole>(*sharded_) : nullptr;
}

void Update::synchronize() {
  if (local_) local_->synchronize();
}

}  // namespace lockstep
