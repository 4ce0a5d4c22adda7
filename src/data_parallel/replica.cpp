#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/replica.hpp>
#include <lockstep/data_parallel/sync_batch_norm.hpp>
#include <lockstep/models/dropout.hpp>

#include "arithmetic_check.hpp"
#include "averaging.hpp"
#include "comm/purpose.hpp"
#include "counted_targets.hpp"
#include "data/latest_batch.hpp"
#include "data/part_weight.hpp"
#include "devices/cuda_graph.hpp"
#include "explained_failure.hpp"
#include "grain_statistics.hpp"
#include "models/random_layers.hpp"
#include "models/sample_places.hpp"
#include "models/weighed_backward.hpp"
#include "ranks/equal_modules.hpp"
#include "ranks/gather.hpp"
#include "ranks/rank_place.hpp"
#include "ranks/shared_seed.hpp"
#include "reducer.hpp"
#include "sharded_net.hpp"
#include "trained_net.hpp"

#include <algorithm>
#include <functional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace lockstep {
namespace {

// Without a grain the gradients' rounding follows the number of ranks.
void warn_if_elastic(const Rank& rank) {
  const auto& place = comm::RankPlace::of(rank);
  if (place.run->succession == nullptr || rank.index() != 0) return;
  place.warn(
      "DataParallel: this run is elastic, and the batch has no grain: once a process is gone, the others go on to "
      "other "
      "bits. Set BatchOptions::grain, such as 32");
}

// A loss of a batch from batches() has the batch's mark, also where the user took its grain away. Otherwise only the
// sizes tell of which batch it is.
void refuse_batch_with_grain(const Rank& rank, const PartSizes& sizes) {
  if (sizes.by_grains || sizes.mark != 0) return;
  const auto latest = latest_batch();
  if (!latest || latest->grain == 0) return;
  if (sizes.global > 0 && (sizes.global != latest->global || sizes.local > latest->local)) return;
  throw Error(
      rank.name() + ": DataParallel: a backward without grains, while the batch of " + std::to_string(latest->global) +
      " samples that batches() gave has grains of " + std::to_string(latest->grain) +
      ". Its bits would depend on the number of ranks. Take net.loss(batch, function), which calls the function "
      "for each grain; or leave out BatchOptions::grain");
}

}  // namespace

Replica::Replica(std::shared_ptr<torch::nn::Module> module, Rank& rank, const DataParallelOptions& options)
    : module_(std::move(module)),
      rank_(rank),
      places_(std::make_unique<SamplePlaces>(rank.seed(), rank.index(), rank.world_size())) {
  if (!module_) throw Error(rank_.name() + ": DataParallel: the module is null; build it first");
  warn_of_shared_seed(rank_);
  warn_of_shared_draws(rank_, "DataParallel", first_random_layer(*module_));
  name_dropouts(*module_);
  make_modules_equal(*module_, rank_, "DataParallel");
  for (const auto& parameter : module_->parameters()) parameters_.insert(parameter.unsafeGetTensorImpl());
  if (options.check_arithmetic != 0) {
    arithmetic_ = std::make_unique<ArithmeticCheck>(options.check_arithmetic, *module_, rank_);
  }
  if (options.sharded != Sharded::parameters && !options.units.empty()) {
    throw Error(rank_.name() +
                ": DataParallel: `units` are of Sharded::parameters; leave them out, or shard the parameters");
  }
  if (options.sharded != Sharded::nothing) {
    sharded_ = std::make_shared<ShardedNet>(*module_, rank_, options);
    set_averaging(sharded_->reducer());
  } else if (options.average) {
    set_averaging(std::make_shared<Reducer>(*module_, rank_, options));
  }
}

Replica::~Replica() = default;

// ---- A backward.

Loss Replica::mean(torch::Tensor local_mean, int64_t local_size, int64_t global_size, int32_t mark) {
  const double weight = weight_of(local_size, global_size);
  const bool no_samples = local_size == 0;
  if (no_samples && !(local_mean.defined() && forwards_empty_parts())) local_mean = torch::zeros({}, rank_.device());
  if (!local_mean.defined() || local_mean.numel() != 1) {
    throw Error(
        "DataParallel: the loss must be one number, the mean over the part's samples; use the criterion's mean "
        "reduction");
  }
  if (local_mean.dim() > 0) local_mean = local_mean.reshape({});
  return Loss(shared_from_this(), std::move(local_mean), weight, local_size, global_size, mark);
}

double Replica::weight_of(int64_t local_size, int64_t global_size) const {
  return part_weight(local_size, global_size, rank_.world_size(), "DataParallel");
}

// Where nothing is to be trained, no loss has a graph.
void Replica::refuse_loss_without_graph() const {
  for (const auto& parameter : module_->parameters()) {
    if (!parameter.requires_grad()) continue;
    throw Error(
        rank_.name() +
        ": DataParallel: backward() of a loss that no parameter leads to: it was computed under NoGradGuard "
        "or InferenceMode, or from detached tensors or item(). Compute it from the net's output, with gradients on");
  }
}

// Nobody would average a new parameter's gradients, and it was not made equal on all ranks.
void Replica::check_that_no_parameter_is_new() const {
  const auto parameters = module_->parameters();
  const auto is_new = [this](const torch::Tensor& tensor) {
    return !parameters_.contains(tensor.unsafeGetTensorImpl());
  };
  if (std::none_of(parameters.begin(), parameters.end(), is_new)) return;
  for (const auto& item : module_->named_parameters()) {
    if (!is_new(item.value())) continue;
    throw Error(rank_.name() + ": DataParallel: " + item.key() +
                " was registered after this DataParallel was made, so that it is not equal on all ranks, nor are its "
                "gradients averaged. Register all layers first, then make the DataParallel, and then the optimizer");
  }
}

// A part that is the whole batch has the mean that one device has. A CUDA graph cannot record what the host reads.
void Replica::check_targets(const at::Tensor& mean, int64_t samples, int64_t of_batch) {
  if (!averaging_ || samples == of_batch || (rank_.device().is_cuda() && is_recording())) return;
  if (!rank_.device().is_cpu() && ++targets_checked_ > kChecksOnGpu) return;
  check_counted_targets(mean, samples, rank_.name() + ": DataParallel");
}

void Replica::backward_through(const std::function<void()>& compute, int64_t local_size, int64_t global_size,
                               int32_t mark) {
  backward_of_parts(compute, {.local = local_size, .global = global_size, .mark = mark});
}

void Replica::backward_of_parts(const std::function<void()>& compute, const PartSizes& sizes) {
  RECORD_USER_SCOPE("lockstep::backward");
  rank_.backend();  // throws once the run is over
  warn_of_shared_seed(rank_);
  refuse_batch_with_grain(rank_, sizes);
  if (arithmetic_ && !sizes.by_grains) {
    throw Error(rank_.name() +
                ": DataParallel: check_arithmetic computes grains again, and this batch has none. Set "
                "BatchOptions::grain, such as 32, and take net.loss(batch, function); or leave out check_arithmetic");
  }
  if (averaging_) check_that_no_parameter_is_new();
  if (sharded_) sharded_->check_optimizer();
  waiting_ += sizes.local;
  by_grains_ = sizes.by_grains;
  const auto computes = [&] {
    try {
      compute();
    } catch (...) {
      rethrow_failure();
      throw;
    }
  };
  if (!sync_) {
    places_->computed();
    return computes();
  }
  if (partial_) {
    places_->computed();
    return averaging_->average_during(computes, {.mark = sizes.mark, .partial = true});
  }
  if (places_->steps_done() == 0 && !sizes.by_grains) warn_if_elastic(rank_);
  comm::RankPlace::of(rank_).world().stepped(places_->steps_done());
  places_->set_steps_done(places_->steps_done() + 1);
  if (!averaging_) return computes();
  averaging_->loop_warnings().see_backward(*module_, sizes.mark, rank_);
  PartSizes all = sizes;
  all.accumulated = std::exchange(waiting_, 0);
  if (!computed_) return averaging_->average_during(computes, all);
  averaging_->average_during(
      [&] {
        computes();
        computed_();
      },
      all);
  averaged_();
}

// ---- Around it.

void Replica::watch_backwards(std::function<void()> computed, std::function<void()> averaged) {
  if (computed_) throw Error("DataParallel: this net's backwards are watched already; one Balance is enough");
  if (!averaging_) {
    throw Error(
        "DataParallel: with average = false backwards wait for no other rank, so there is nothing to watch; a Balance "
        "needs average = true");
  }
  if (averaging_->waits_in_backward()) {
    throw Error(
        "DataParallel: from Sharded::gradients on ranks wait for others within backward, so the rank's own time cannot "
        "be seen; a Balance needs Sharded::state, or nothing");
  }
  computed_ = std::move(computed);
  averaged_ = std::move(averaged);
}

void Replica::stop_watching() noexcept {
  computed_ = averaged_ = nullptr;
}

NoSync Replica::no_sync() {
  return NoSync(shared_from_this());
}

void Replica::set_sync(bool sync) {
  sync_ = sync;
  if (averaging_) averaging_->listen(sync);
}

void Replica::set_averaging(std::shared_ptr<Averaging> averaging) {
  if (arithmetic_ && averaging->exchanges_in_forward()) {
    throw Error(rank_.name() +
                ": DataParallel: check_arithmetic has a grain computed again by one rank, which needs all parameters, "
                "and with Sharded::parameters each rank keeps a slice of them. Take Sharded::gradients, or leave out "
                "check_arithmetic");
  }
  averaging_ = std::move(averaging);
  averaging_->listen(sync_);
  if (!arithmetic_) return;
  averaging_->observe_grains([this](int64_t grain, const at::Tensor& parameter, const at::Tensor& gradient) {
    arithmetic_->note_gradient(grain, parameter, gradient);
  });
}

void Replica::check_that_steps_were_averaged() const {
  if (!averaging_) return;
  averaging_->check_that_steps_were_averaged();
  // Divided parameters are there for one layer after the other, so nobody may read them between.
  if (!averaging_->exchanges_in_forward()) averaging_->loop_warnings().see_forward(*module_, rank_);
}

bool Replica::forwards_empty_parts() const {
  return has_sync_batchnorm(*module_) || (averaging_ && averaging_->exchanges_in_forward());
}

void Replica::rethrow_failure() const {
  if (averaging_) averaging_->rethrow_failure();
  // Within a grain's forward GrainStatistics says which grain has one sample.
  explain_failure(*module_, rank_, /*of_batch_of_one=*/!statistics_ || !statistics_->is_open());
}

SamplePlace Replica::place_of(const Batch& batch) {
  return places_->of(batch);
}

int64_t Replica::steps_done() const {
  return places_->steps_done();
}

void Replica::set_steps_done(int64_t steps) {
  places_->set_steps_done(steps);
}

void Replica::leave_comparing() {
  if (averaging_) averaging_->leave_comparing();
}

std::vector<int64_t> Replica::learnt_order() const {
  return averaging_ ? averaging_->order() : std::vector<int64_t>();
}

void Replica::set_learnt_order(const std::vector<int64_t>& order) {
  if (averaging_) averaging_->set_order(order);
}

// ---- Criterion, Loss and NoSync.

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

Loss::Loss(std::shared_ptr<Replica> replica, torch::Tensor local_mean, double weight, int64_t local_size,
           int64_t global_size, int32_t mark)
    : replica_(std::move(replica)),
      local_mean_(std::move(local_mean)),
      weight_(weight),
      local_size_(local_size),
      global_size_(global_size),
      mark_(mark) {}

void Loss::backward() {
  if (auto* const averaging = replica_->averaging()) {
    const bool by_grains = !grains_.empty();
    averaging->loop_warnings().see_loss(by_grains ? grains_[0].mean : local_mean_,
                                        by_grains ? grains_[0].size : local_size_, replica_->rank());
  }
  if (!runs_.empty()) return replica_->backward_of_losses(*this);
  if (local_size_ > 0 && !local_mean_.requires_grad()) replica_->refuse_loss_without_graph();
  if (local_size_ > 0) replica_->check_targets(local_mean_, local_size_, global_size_);
  const auto compute = [this] {
    // Without a graph, as an empty part mostly is, gradients are what they were.
    if (!local_mean_.requires_grad()) return;
    const WeighedBackward weighed(local_mean_, weight_, *replica_->module_);
    local_mean_.backward(weighed.seed());
  };
  replica_->backward_through(compute, local_size_, global_size_, mark_);
}

// With a grain each one has a row that one rank fills, so that the ranks' sum is exact. The rows are added in their
// order, which is that of the grains.
double Loss::global_item() const {
  Rank& rank = replica_->rank();
  if (runs_.empty()) return rank.mean(item(), static_cast<double>(local_size_));
  const c10::NoGradGuard no_grad;
  const std::string use = "mean()";
  const comm::Purpose purpose(use);
  const at::Tensor table = at::zeros({runs_.back(), 2}, at::TensorOptions(rank.device()).dtype(at::kDouble));
  for (const auto& [number, size, mean] : grains_) {
    if (size == 0) continue;  // a stand-in
    table[number][0].copy_(mean.to(at::kDouble) * static_cast<double>(size));
    table[number][1].fill_(static_cast<double>(size));
  }
  rank.allreduce(table);
  const at::Tensor rows = table.cpu();
  const double* const row = rows.const_data_ptr<double>();
  double sum = 0, samples = 0;
  for (int64_t number = 0; number < rows.size(0); ++number) {
    sum += row[2 * number];
    samples += row[2 * number + 1];
  }
  return sum / samples;
}

NoSync::NoSync(std::shared_ptr<Replica> replica) : replica_(std::move(replica)), before_(replica_->sync_) {
  replica_->set_sync(false);
}

NoSync::~NoSync() {
  replica_->set_sync(before_);
}

Whole::Whole(std::shared_ptr<Replica> replica) : replica_(std::move(replica)) {
  if (replica_->sharded()) replica_->sharded()->hold();
}

Whole::~Whole() {
  if (replica_->sharded()) replica_->sharded()->release();
}

// LibTorch's optimizers and clip_grad_norm_ would find no gradients, and do nothing in silence.
void Replica::check_module_is_open() const {
  if (!sharded_ || sharded_->is_held() || SampleScope::current() != nullptr) return;
  throw Error(rank_.name() +
              ": DataParallel: the net is sharded, so its module's parameters have no gradients, and may not be whole. "
              "Step and clip with a lockstep::Optimizer(net, …); call net.train() and net.eval(); and reach the module "
              "(`net->`, `*net`) within loss(), while a net.samples(batch) lives, or while a net.whole() does, which "
              "all ranks make");
}

std::shared_ptr<TrainedNet> trained_net(const std::shared_ptr<Replica>& replica) {
  if (replica->is_part()) {
    throw Error(replica->rank().name() +
                ": Optimizer: this DataParallel is a part of a SplitModel, and ranks hold other parts; make the "
                "Optimizer of the SplitModel");
  }
  return std::make_shared<TrainedNet>(replica);
}

bool Replica::adds_up_parts() const {
  return averaging_ && averaging_->adds_up_parts();
}

PartOfStep::PartOfStep(std::shared_ptr<Replica> replica) : replica_(std::move(replica)) {
  if (!replica_->adds_up_parts()) {
    throw Error(replica_->rank_.name() + ": PartOfStep: parts add up from Sharded::gradients on; take NoSync");
  }
  replica_->partial_ = true;
}

PartOfStep::~PartOfStep() {
  replica_->partial_ = false;
}

}  // namespace lockstep
