#include "replica.hpp"

#include <c10/util/Exception.h>
#include <lockstep/base/error.hpp>

#include "base/exception_text.hpp"
#include "nn/random_layers.hpp"
#include "ranks/equal_modules.hpp"
#include "ranks/shared_generator.hpp"
#include "reducer.hpp"
#include "trained_net.hpp"

#include <exception>
#include <string>
#include <utility>

namespace lockstep {
namespace {

std::shared_ptr<torch::nn::Module> made_equal(std::shared_ptr<torch::nn::Module> module, Rank rank) {
  if (!module) throw Error(rank.name() + ": DataParallel: the module is null; build it first");
  warn_of_shared_seed(rank);
  warn_of_shared_draws(rank, "DataParallel", first_random_layer(*module));
  name_dropouts(*module);
  make_modules_equal(*module, rank, "DataParallel");
  return module;
}

void check_options(const DataParallelOptions& options, const Rank& rank) {
  if (options.sharded == Sharded::parameters || options.units.empty()) return;
  throw Error(rank.name() +
              ": DataParallel: `units` are of Sharded::parameters; leave them out, or shard the parameters");
}

std::string why_batch_of_one() {
  return "a BatchNorm cannot train on one sample, and this rank's part of the batch has one, as it may be of the last "
         "batch of an epoch. Choose a batch size whose last batch has two samples or more for each rank, or leave that "
         "batch out: BatchOptions::drop_last, in a run `drop_last`. If the ranks have two samples or more together, "
         "convert_sync_batchnorm() normalises over all of them";
}

std::string why_graph_is_gone(const torch::nn::Module& module) {
  std::string kept;
  for (const auto& item : module.named_buffers()) {
    if (item.value().grad_fn()) kept += (kept.empty() ? "the buffer " : ", ") + item.key();
  }
  return "the loss leads to " + (kept.empty() ? "something" : kept) +
         " that was computed with gradients before this step, as in a constructor or by an earlier forward, and whose "
         "graph an earlier backward has used up. Compute it in each forward(), or keep its detach()";
}

// DataParallel has refused parameters and buffers of that mode when it was made.
std::string why_inference_tensors() {
  return "a tensor that is no parameter or buffer, such as the batch, was made in InferenceMode, so no backward can "
         "use it. Make it outside of that mode, under NoGradGuard if it needs no gradients; or take a clone() of it "
         "outside, and use that";
}

}  // namespace

Replica::Replica(std::shared_ptr<torch::nn::Module> module, const Rank& rank, const DataParallelOptions& options)
    : module_(made_equal(std::move(module), rank)),
      rank_(rank),
      places_(rank.seed(), rank.index(), rank.world_size()),
      warnings_(*module_, rank_),
      grains_(*this, options.grain_check),
      counts_(rank_),
      criteria_(rank_),
      backwards_(*this) {
  check_options(options, rank_);
  if (options.sharded != Sharded::nothing) {
    sharded_ = std::make_shared<ShardedNet>(*module_, rank_, options);
    averaging_ = sharded_->reducer();
  } else if (options.average) {
    averaging_ = std::make_shared<Reducer>(*module_, rank_, options);
  }
}

void Replica::rethrow_failure() const {
  if (sharded_) sharded_->reducer()->rethrow_failure();
  if (!std::current_exception()) return;
  try {
    throw;
  } catch (const c10::Error&) {  // an Error of lockstep explains itself
    const std::string text = exception_text(std::current_exception());
    const auto says = [&](const char* part) { return text.find(part) != std::string::npos; };
    std::string why;
    // Within a grain's forward GrainStatistics says which grain has one sample.
    if (!grains_.is_in_forward() && says("Expected more than 1 value per channel")) why = why_batch_of_one();
    if (says("backward through the graph a second time")) why = why_graph_is_gone(*module_);
    if (says("nference tensor")) why = why_inference_tensors();
    if (why.empty()) return;
    std::throw_with_nested(Error(rank_.name() + ": DataParallel: " + why + ". LibTorch said: " + text));
  } catch (const std::exception&) {
  }
}

// ---- A part of a network, or sharded.

void Replica::become_part() {
  if (!sharded_) hidden_ = std::make_unique<HiddenGradients>(*module_);  // a sharded net keeps its gradients elsewhere
}

// Without an Optimizer nobody could step: `.grad` is undefined after the backward.
void Replica::check_optimizer() const {
  if (hidden_ && hidden_->are_used()) {
    throw Error(rank_.name() +
                ": DataParallel: a backward would add to the gradients of the last step. The net is split by layers or "
                "channels, where the layers' zero_grad() clears nothing: call lockstep::Optimizer::zero_grad()");
  }
  if (optimizers_ > 0 || (!sharded_ && !hidden_)) return;
  throw Error(
      rank_.name() + ": DataParallel: the net is " + (sharded_ ? "sharded" : "split by layers or channels") +
      ", and there is no lockstep::Optimizer of it. Make one, and keep it as long as you train; an optimizer of "
      "LibTorch would find no gradients");
}

// ---- The handle.

Replicas::Replicas(std::shared_ptr<torch::nn::Module> module, const Rank& rank, const DataParallelOptions& options)
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
  replica.warnings().see_forward();
}

at::Tensor Replicas::loss_of_outputs(Replica& replica, const Criterion& criterion, const at::Tensor& y_hat,
                                     const Batch& batch) {
  return replica.criteria().loss(criterion, y_hat, batch);
}

void Replicas::rethrow_failure(const Replica& replica) {
  replica.rethrow_failure();
}

}  // namespace lockstep
