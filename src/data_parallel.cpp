#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <lockstep/data_parallel.hpp>
#include <lockstep/error.hpp>
#include <lockstep/sync_batch_norm.hpp>

#include "averaging.hpp"
#include "equal_modules.hpp"
#include "exception_text.hpp"
#include "part_weight.hpp"
#include "reducer.hpp"

#include <exception>
#include <functional>
#include <string>
#include <vector>

namespace lockstep {

class Replica {
 public:
  Replica(std::shared_ptr<torch::nn::Module> module, Rank& rank, const DataParallelOptions& options);

  Loss loss(const std::shared_ptr<Replica>& self, torch::Tensor local_mean, int64_t local_size,
            int64_t global_size) const;
  double weight_of(int64_t local_size, int64_t global_size) const;
  bool forwards_empty_parts() const { return has_sync_batchnorm(*module_); }
  void backward_through(const std::function<void()>& compute);
  void watch(std::function<void()> computed, std::function<void()> averaged);

  bool sync() const { return sync_; }
  void set_sync(bool sync);
  void set_averaging(std::shared_ptr<Averaging> averaging);
  Averaging* averaging() const { return averaging_.get(); }

  torch::nn::Module& module() { return *module_; }
  Rank& rank() { return rank_; }

 private:
  const std::shared_ptr<torch::nn::Module> module_;
  Rank& rank_;
  std::shared_ptr<Averaging> averaging_;  // null: somebody else averages
  bool sync_ = true;
  std::function<void()> computed_, averaged_;  // see watch_backwards(); empty: nobody watches
};

Replica::Replica(std::shared_ptr<torch::nn::Module> module, Rank& rank, const DataParallelOptions& options)
    : module_(std::move(module)), rank_(rank) {
  make_modules_equal(*module_, rank_, "DataParallel");
  if (!options.average) return;
  std::vector<std::pair<std::string, torch::Tensor>> parameters;
  for (const auto& item : module_->named_parameters()) parameters.emplace_back(item.key(), item.value());
  averaging_ = std::make_shared<Reducer>(parameters, rank_, options);
}

Loss Replica::loss(const std::shared_ptr<Replica>& self, torch::Tensor local_mean, int64_t local_size,
                   int64_t global_size) const {
  const double weight = weight_of(local_size, global_size);
  const bool no_samples = local_size == 0;
  if (no_samples && !(local_mean.defined() && forwards_empty_parts())) local_mean = torch::zeros({}, rank_.device());
  if (!local_mean.defined() || local_mean.numel() != 1) {
    throw Error(
        "DataParallel: the loss must be one number, the mean over the part's samples; use the criterion's mean "
        "reduction");
  }
  return Loss(self, std::move(local_mean), weight);
}

double Replica::weight_of(int64_t local_size, int64_t global_size) const {
  return part_weight(local_size, global_size, rank_.world_size(), "DataParallel");
}

void Replica::backward_through(const std::function<void()>& compute) {
  RECORD_USER_SCOPE("lockstep::backward");
  if (!sync_ || !averaging_) return compute();
  if (!computed_) return averaging_->average_during(compute);
  averaging_->average_during([&] {
    compute();
    computed_();
  });
  averaged_();
}

void Replica::watch(std::function<void()> computed, std::function<void()> averaged) {
  if (computed && computed_)
    throw Error("DataParallel: this net's backwards are watched already; one Balance is enough");
  if (computed && !averaging_) {
    throw Error(
        "DataParallel: with average = false backwards wait for no other rank, so there is nothing to watch; a Balance "
        "needs average = true");
  }
  if (computed && averaging_->waits_in_backward()) {
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

Loss::Loss(std::shared_ptr<Replica> replica, torch::Tensor local_mean, double weight)
    : replica_(std::move(replica)), local_mean_(std::move(local_mean)), weight_(weight) {}

void Loss::backward() {
  replica_->backward_through([this] {
    // Without a graph, as an empty part mostly is, gradients are what they were, or zero.
    if (local_mean_.requires_grad()) local_mean_.backward(torch::full_like(local_mean_, weight_));
  });
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
               int64_t global_size) {
  return replica->loss(replica, std::move(local_mean), local_size, global_size);
}

bool forwards_empty_parts(const Replica& replica) {
  return replica.forwards_empty_parts();
}

double weight_of(const Replica& replica, int64_t local_size, int64_t global_size) {
  return replica.weight_of(local_size, global_size);
}

void backward_through(Replica& replica, const std::function<void()>& compute) {
  replica.backward_through(compute);
}

void Averaging::average_during(const std::function<void()>& backward) {
  if (!failure_.empty()) throw Error(failure_);
  try {
    average(backward);
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

}  // namespace lockstep
