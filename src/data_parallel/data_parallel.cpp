#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/sync_batch_norm.hpp>
#include <lockstep/models/dropout.hpp>

#include "averaging.hpp"
#include "base/exception_text.hpp"
#include "data/part_weight.hpp"
#include "models/random_layers.hpp"
#include "models/sample_places.hpp"
#include "ranks/equal_modules.hpp"
#include "ranks/rank_place.hpp"
#include "ranks/shared_seed.hpp"
#include "reducer.hpp"

#include <algorithm>
#include <exception>
#include <functional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace lockstep {
namespace {

void warn_of_shared_generator(const torch::nn::Module& module, const Rank& rank) {
  if (rank.index() != 0 || rank.world_size() == 1 || !rank.device().is_cpu()) return;
  const std::string layer = first_random_layer(module);
  if (layer.empty()) return;
  comm::RankPlace::of(rank).warn(
      "DataParallel: " + layer +
      " draws from LibTorch's default generator, which all ranks of a process share, so that no run repeats another "
      "one. lockstep::Dropout (dropout.hpp) drops the same in every run, on any number of ranks");
}

}  // namespace

class Replica {
 public:
  Replica(std::shared_ptr<torch::nn::Module> module, Rank& rank, const DataParallelOptions& options);

  Loss loss(const std::shared_ptr<Replica>& self, torch::Tensor local_mean, int64_t local_size, int64_t global_size,
            int32_t mark) const;
  double weight_of(int64_t local_size, int64_t global_size) const;
  SamplePlaces& places() { return places_; }
  const SamplePlaces& places() const { return places_; }
  bool forwards_empty_parts() const { return has_sync_batchnorm(*module_); }
  void refuse_loss_without_graph() const;
  void backward_through(const std::function<void()>& compute, int64_t local_size, int64_t global_size, int32_t mark);
  void watch(std::function<void()> computed, std::function<void()> averaged);
  void stop_watching() noexcept { computed_ = averaged_ = nullptr; }

  bool sync() const { return sync_; }
  void set_sync(bool sync);
  void set_averaging(std::shared_ptr<Averaging> averaging);
  Averaging* averaging() const { return averaging_.get(); }

  torch::nn::Module& module() { return *module_; }
  Rank& rank() { return rank_; }

 private:
  void check_that_no_parameter_is_new() const;

  const std::shared_ptr<torch::nn::Module> module_;
  Rank rank_;
  std::shared_ptr<Averaging> averaging_;                   // null: somebody else averages
  std::unordered_set<const c10::TensorImpl*> parameters_;  // when the replica was made
  bool sync_ = true;
  int64_t waiting_ = 0;  // samples of the parts whose gradients the next averaged backward averages with its own
  SamplePlaces places_;
  std::function<void()> computed_, averaged_;  // see watch_backwards(); empty: nobody watches
};

Replica::Replica(std::shared_ptr<torch::nn::Module> module, Rank& rank, const DataParallelOptions& options)
    : module_(std::move(module)), rank_(rank), places_(rank.seed(), rank.index(), rank.world_size()) {
  if (!module_) throw Error(rank_.name() + ": DataParallel: the module is null; build it first");
  warn_of_shared_seed(rank_);
  warn_of_shared_generator(*module_, rank_);
  name_dropouts(*module_);
  make_modules_equal(*module_, rank_, "DataParallel");
  for (const auto& parameter : module_->parameters()) parameters_.insert(parameter.unsafeGetTensorImpl());
  if (!options.average) return;
  std::vector<std::pair<std::string, torch::Tensor>> parameters;
  for (const auto& item : module_->named_parameters()) parameters.emplace_back(item.key(), item.value());
  averaging_ = std::make_shared<Reducer>(parameters, rank_, options);
}

Loss Replica::loss(const std::shared_ptr<Replica>& self, torch::Tensor local_mean, int64_t local_size,
                   int64_t global_size, int32_t mark) const {
  const double weight = weight_of(local_size, global_size);
  const bool no_samples = local_size == 0;
  if (no_samples && !(local_mean.defined() && forwards_empty_parts())) local_mean = torch::zeros({}, rank_.device());
  if (!local_mean.defined() || local_mean.numel() != 1) {
    throw Error(
        "DataParallel: the loss must be one number, the mean over the part's samples; use the criterion's mean "
        "reduction");
  }
  return Loss(self, std::move(local_mean), weight, local_size, global_size, mark);
}

double Replica::weight_of(int64_t local_size, int64_t global_size) const {
  return part_weight(local_size, global_size, rank_.world_size(), "DataParallel");
}

// Where nothing is to be trained, no loss has a graph.
void Replica::refuse_loss_without_graph() const {
  for (const auto& parameter : module_->parameters()) {
    if (!parameter.requires_grad()) continue;
    throw Error(rank_.name() +
                ": DataParallel: backward() of a loss that no parameter leads to: it was computed under NoGradGuard, "
                "or from detached tensors or item(). Compute it from the net's output, with gradients on");
  }
}

// Nobody would average its gradients, nor was it made equal on all ranks.
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

void Replica::backward_through(const std::function<void()>& compute, int64_t local_size, int64_t global_size,
                               int32_t mark) {
  RECORD_USER_SCOPE("lockstep::backward");
  rank_.backend();  // throws once the run is over
  if (averaging_) check_that_no_parameter_is_new();
  waiting_ += local_size;
  if (!sync_) {
    places_.computed();
    return compute();
  }
  comm::RankPlace::of(rank_).world().stepped(places_.steps_done());
  places_.set_steps_done(places_.steps_done() + 1);
  if (!averaging_) return compute();
  const PartSizes sizes{
      .local = local_size, .accumulated = std::exchange(waiting_, 0), .global = global_size, .mark = mark};
  if (!computed_) return averaging_->average_during(compute, sizes);
  averaging_->average_during(
      [&] {
        compute();
        computed_();
      },
      sizes);
  averaged_();
}

void Replica::watch(std::function<void()> computed, std::function<void()> averaged) {
  if (computed_) throw Error("DataParallel: this net's backwards are watched already; one Balance is enough");
  if (!averaging_) {
    throw Error(
        "DataParallel: with average = false backwards wait for no other rank, so there is nothing to watch; a Balance "
        "needs average = true");
  }
  if (averaging_->waits_in_backward()) {
    throw Error(
        "DataParallel: a ShardedOptimizer of stage 2 waits for other ranks within backward, so the rank's own time "
        "cannot be seen; a Balance needs stage 1, or none");
  }
  computed_ = std::move(computed);
  averaged_ = std::move(averaged);
}

void Replica::set_sync(bool sync) {
  sync_ = sync;
  if (averaging_) averaging_->listen(sync);
}

void Replica::set_averaging(std::shared_ptr<Averaging> averaging) {
  averaging_ = std::move(averaging);
  averaging_->listen(sync_);
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
  if (local_size_ > 0 && !local_mean_.requires_grad()) replica_->refuse_loss_without_graph();
  const auto compute = [this] {
    // Without a graph, as an empty part mostly is, gradients are what they were.
    if (local_mean_.requires_grad()) local_mean_.backward(torch::full_like(local_mean_, weight_));
  };
  replica_->backward_through(compute, local_size_, global_size_, mark_);
}

NoSync::NoSync(std::shared_ptr<Replica> replica) : replica_(std::move(replica)), before_(replica_->sync()) {
  replica_->set_sync(false);
}

NoSync::~NoSync() {
  replica_->set_sync(before_);
}

std::shared_ptr<Replica> make_replica(std::shared_ptr<torch::nn::Module> module, Rank& rank,
                                      const DataParallelOptions& options) {
  return std::make_shared<Replica>(std::move(module), rank, options);
}

Loss make_loss(const std::shared_ptr<Replica>& replica, torch::Tensor local_mean, int64_t local_size,
               int64_t global_size, int32_t mark) {
  return replica->loss(replica, std::move(local_mean), local_size, global_size, mark);
}

bool forwards_empty_parts(const Replica& replica) {
  return replica.forwards_empty_parts();
}

void check_that_steps_were_averaged(const Replica& replica) {
  if (replica.averaging() != nullptr) replica.averaging()->check_that_steps_were_averaged();
}

double weight_of(const Replica& replica, int64_t local_size, int64_t global_size) {
  return replica.weight_of(local_size, global_size);
}

SamplePlace place_of(Replica& replica, const Batch& batch) {
  return replica.places().of(batch);
}

int64_t steps_done(const Replica& replica) {
  return replica.places().steps_done();
}

void set_steps_done(Replica& replica, int64_t steps) {
  replica.places().set_steps_done(steps);
}

void backward_through(Replica& replica, const std::function<void()>& compute, int64_t local_size, int64_t global_size,
                      int32_t mark) {
  replica.backward_through(compute, local_size, global_size, mark);
}

void Averaging::average_during(const std::function<void()>& backward, const PartSizes& sizes) {
  if (!failure_.empty()) throw Error(failure_);
  backward_name_ = "DataParallel's backward " + std::to_string(++backwards_);
  try {
    average(backward, sizes);
  } catch (...) {
    // Posting the rest would let the others go on with gradients that lack this rank's part. So this rank stays out of
    // step, and whoever waits for it is told when it leaves or makes another call.
    abandon();
    failure_ =
        name_ + ": an earlier backward of this rank failed before its gradients were averaged, so it is out " +
        "of step with the other ranks. End the run there. What failed: " + exception_text(std::current_exception());
    throw;
  }
}

void set_averaging(Replica& replica, std::shared_ptr<Averaging> averaging) {
  replica.set_averaging(std::move(averaging));
}

Averaging* averaging_of(const Replica& replica) {
  return replica.averaging();
}

Rank& rank_of(Replica& replica) {
  return replica.rank();
}

torch::nn::Module& module_of(Replica& replica) {
  return replica.module();
}

std::vector<int64_t> learnt_order(const Replica& replica) {
  return replica.averaging() == nullptr ? std::vector<int64_t>() : replica.averaging()->order();
}

void set_learnt_order(Replica& replica, const std::vector<int64_t>& order) {
  if (replica.averaging() != nullptr) replica.averaging()->set_order(order);
}

void watch_backwards(Replica& replica, std::function<void()> computed, std::function<void()> averaged) {
  replica.watch(std::move(computed), std::move(averaged));
}

void stop_watching(Replica& replica) noexcept {
  replica.stop_watching();
}

}  // namespace lockstep
