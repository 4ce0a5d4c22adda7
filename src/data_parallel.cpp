#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <lockstep/data_parallel.hpp>
#include <lockstep/error.hpp>
#include <lockstep/sync_batch_norm.hpp>

#include "of_all_ranks.hpp"
#include "reducer.hpp"

#include <algorithm>
#include <functional>
#include <set>
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

  bool sync() const { return sync_; }
  void set_sync(bool sync);

 private:
  void make_equal();
  void check_that_modules_match();

  const std::shared_ptr<torch::nn::Module> module_;
  Rank& rank_;
  std::unique_ptr<Reducer> reducer_;  // null: somebody else averages
  bool sync_ = true;
};

Replica::Replica(std::shared_ptr<torch::nn::Module> module, Rank& rank, const DataParallelOptions& options)
    : module_(std::move(module)), rank_(rank) {
  make_equal();
  if (!options.average) return;
  std::vector<std::pair<std::string, torch::Tensor>> parameters;
  for (const auto& item : module_->named_parameters()) parameters.emplace_back(item.key(), item.value());
  reducer_ = std::make_unique<Reducer>(parameters, rank_, options);
}

void Replica::make_equal() {
  const torch::NoGradGuard no_grad;
  module_->to(rank_.device());
  check_that_modules_match();
  for (const auto& parameter : module_->parameters()) rank_.broadcast(parameter);
  for (const auto& buffer : module_->buffers()) rank_.broadcast(buffer);
}

void Replica::check_that_modules_match() {
  std::vector<torch::Tensor> tensors = module_->parameters();
  const auto buffers = module_->buffers();
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  const auto count = static_cast<int64_t>(tensors.size());
  const torch::Tensor counts = of_all_ranks(rank_, {count});
  for (int other = 0; other < rank_.world_size(); ++other) {
    const auto their_count = counts[other][0].item<int64_t>();
    if (their_count == count) continue;
    throw Error("DataParallel: the ranks' modules differ: rank " + std::to_string(rank_.index()) + " has " +
                std::to_string(count) + " parameters and buffers, rank " + std::to_string(other) + " has " +
                std::to_string(their_count) + ". Every rank must build the same module");
  }

  // Shapes and types as one number each, so that a difference is found before Gloo moves bytes into the wrong places.
  const auto describe = [](const torch::Tensor& tensor) {
    return std::string(c10::toString(tensor.scalar_type())) + " " + c10::str(tensor.sizes());
  };
  std::vector<int64_t> kinds;
  for (const auto& tensor : tensors) kinds.push_back(static_cast<int64_t>(std::hash<std::string>()(describe(tensor))));
  const torch::Tensor all_kinds = of_all_ranks(rank_, kinds);
  for (int other = 0; other < rank_.world_size(); ++other) {
    for (int64_t i = 0; i < count; ++i) {
      if (all_kinds[other][i].item<int64_t>() == kinds[i]) continue;
      throw Error("DataParallel: the ranks' modules differ: on rank " + std::to_string(rank_.index()) +
                  " parameter or buffer " + std::to_string(i) + " is " + describe(tensors[i]) + ", and on rank " +
                  std::to_string(other) + " it has another shape or type. Every rank must build the same module");
    }
  }

  std::vector<int64_t> addresses{rank_.process()};  // which mean something within their process only
  for (const auto& tensor : tensors) addresses.push_back(reinterpret_cast<int64_t>(tensor.const_data_ptr()));
  const torch::Tensor table = of_all_ranks(rank_, addresses);
  const std::set<int64_t> mine(addresses.begin() + 1, addresses.end());
  for (int other = 0; other < rank_.world_size(); ++other) {
    if (other == rank_.index() || table[other][0].item<int64_t>() != rank_.process()) continue;
    for (int64_t i = 1; i <= count; ++i) {
      const auto address = table[other][i].item<int64_t>();
      if (address == 0 || mine.count(address) == 0) continue;  // 0: no elements
      throw Error("DataParallel: ranks " + std::to_string(std::min(rank_.index(), other)) + " and " +
                  std::to_string(std::max(rank_.index(), other)) +
                  " hold the same parameters in memory, not replicas (a copy of a torch::nn::Module shares its "
                  "tensors). Build the module inside the function given to run()");
    }
  }
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

// The average has equal weights: a part that holds more samples than the average must count for more.
double Replica::weight_of(int64_t local_size, int64_t global_size) const {
  if (local_size < 0 || global_size < 1 || local_size > global_size) {
    throw Error("DataParallel: a part of " + std::to_string(local_size) + " samples of a global batch of " +
                std::to_string(global_size) + "; a part has 0 to all of the batch's samples, and the batch at least 1");
  }
  return static_cast<double>(local_size) * rank_.world_size() / static_cast<double>(global_size);
}

void Replica::backward_through(const std::function<void()>& compute) {
  RECORD_USER_SCOPE("lockstep::backward");
  if (sync_ && reducer_) {
    reducer_->average_during(compute);
  } else {
    compute();
  }
}

void Replica::set_sync(bool sync) {
  sync_ = sync;
  if (reducer_) reducer_->listen(sync);
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

}  // namespace lockstep
