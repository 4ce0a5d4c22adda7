#include "replica.hpp"

#include <lockstep/base/error.hpp>
#include <lockstep/nn/dropout.hpp>

#include "explained_failure.hpp"
#include "nn/name_dropouts.hpp"
#include "nn/random_layers.hpp"
#include "ranks/equal_modules.hpp"
#include "ranks/shared_seed.hpp"
#include "reducer.hpp"
#include "trained_net.hpp"

#include <utility>

namespace lockstep {
namespace {

std::shared_ptr<torch::nn::Module> made_equal(std::shared_ptr<torch::nn::Module> module, Rank& rank) {
  if (!module) throw Error(rank.name() + ": DataParallel: the module is null; build it first");
  warn_of_shared_seed(rank);
  warn_of_shared_draws(rank, "DataParallel", first_random_layer(*module));
  name_dropouts(*module);
  make_modules_equal(*module, rank, "DataParallel");
  return module;
}

void check_options(const DataParallelOptions& options, const Rank& rank) {
  if (options.sharded == Sharded::parameters) {
    if (!options.grain_check) return;
    throw Error(rank.name() +
                ": DataParallel: a grain_check has a grain computed again by one rank, which needs all parameters, and "
                "with Sharded::parameters each rank keeps a slice of them. Take Sharded::gradients, or leave out the "
                "check");
  }
  if (options.units.empty()) return;
  throw Error(rank.name() +
              ": DataParallel: `units` are of Sharded::parameters; leave them out, or shard the parameters");
}

}  // namespace

Replica::Replica(std::shared_ptr<torch::nn::Module> module, Rank& rank, const DataParallelOptions& options)
    : module_(made_equal(std::move(module), rank)),
      rank_(rank),
      places_(rank.seed(), rank.index(), rank.world_size()),
      grains_(*this, options.grain_check),
      backwards_(*this) {
  check_options(options, rank_);
  if (options.sharded != Sharded::nothing) {
    sharded_ = std::make_shared<ShardedNet>(*module_, rank_, options);
    averaging_ = sharded_->reducer();
  } else if (options.average) {
    averaging_ = std::make_shared<Reducer>(*module_, rank_, options);
  }
  if (averaging_) averaging_->observe_grains(options.grain_check);
}

void Replica::rethrow_failure() const {
  if (sharded_) sharded_->reducer()->rethrow_failure();
  // Within a grain's forward GrainStatistics says which grain has one sample.
  explain_failure(*module_, rank_, /*of_batch_of_one=*/!grains_.is_in_forward());
}

// ---- A part of a network, or sharded.

void Replica::become_part() {
  if (!sharded_) hidden_ = std::make_unique<HiddenGradients>(*module_);  // a sharded net keeps its gradients elsewhere
}

// Without an Optimizer nobody could step: `.grad` is undefined after the backward.
void Replica::check_optimizer() const {
  if (optimizers_ > 0 || (!sharded_ && !hidden_)) return;
  throw Error(
      rank_.name() + ": DataParallel: the net is " + (sharded_ ? "sharded" : "split by layers or channels") +
      ", and there is no lockstep::Optimizer of it. Make one, and keep it as long as you train; an optimizer of "
      "LibTorch would find no gradients");
}

// ---- The handle.

Replicas::Replicas(std::shared_ptr<torch::nn::Module> module, Rank& rank, const DataParallelOptions& options)
    : replica_(std::make_shared<Replica>(std::move(module), rank, options)) {}

SampleScope Replicas::samples(const Batch& batch) const {
  return SampleScope(replica_->places().of(batch));
}

int64_t Replicas::steps_done() const {
  return replica_->places().steps_done();
}

void Replicas::set_steps_done(int64_t steps) {
  replica_->places().set_steps_done(steps);
}

void Replicas::backward_through(const std::function<void()>& compute) {
  replica_->backwards().run(compute);
}

std::shared_ptr<TrainedNet> Replicas::trained() const {
  return std::make_shared<TrainedNet>(replica_);
}

// LibTorch's optimizers and clip_grad_norm_ would find no gradients, and do nothing in silence.
void Replicas::check_module_is_open(const Replica& replica) {
  if (replica.sharded() && SampleScope::current() == nullptr) replica.sharded()->check_that_it_is_held();
}

// Divided parameters are there for one layer after the other, so nobody may read them between.
void Replicas::before_forward(Replica& replica) {
  if (!replica.averaging() || replica.divides_parameters()) return;
  replica.warnings().see_forward(replica.module(), replica.rank());
}

void Replicas::rethrow_failure(const Replica& replica) {
  replica.rethrow_failure();
}

// ---- Criterion.

void Criterion::check_reduction(const std::string& name) {
  if (name.find("Mean") != name.npos) return;
  throw Error("a criterion with the reduction " + name +
              ": a part's loss must be the mean over its samples, so that the parts' average is the whole batch's. "
              "Leave the option `reduction` at its default");
}

void Criterion::check_weights(const at::Tensor& weights_of_classes) {
  if (!weights_of_classes.defined()) return;
  throw Error(
      "a criterion with weights of classes: it divides by the sum of its part's weights, so that the parts' average is "
      "not the whole batch's. Divide the weighted sum (reduction torch::kSum) by the part's number of samples in a "
      "function of your own: net.loss(batch, function)");
}

}  // namespace lockstep
