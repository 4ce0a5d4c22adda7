#include <c10/core/GradMode.h>
#include <lockstep/data_parallel.hpp>
#include <lockstep/error.hpp>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

namespace lockstep {

class Replica {
 public:
  Replica(std::shared_ptr<torch::nn::Module> module, Rank& rank);

  Loss loss(const std::shared_ptr<Replica>& self, torch::Tensor local_mean, int64_t local_size,
            int64_t global_size) const;
  void average_gradients();
  void backward(const torch::Tensor& local_mean, double weight);

  bool sync = true;

 private:
  void check_that_modules_match();

  // The gradients of all parameters of one type in one piece of memory: one allreduce serves them all.
  struct Bucket {
    torch::Tensor flat;
    std::vector<std::string> names;
    std::vector<torch::Tensor> parameters;
    std::vector<torch::Tensor> views;  // parameter i's gradient in flat, in the parameter's shape
  };

  std::shared_ptr<torch::nn::Module> module_;
  Rank& rank_;
  std::vector<Bucket> buckets_;
};

Replica::Replica(std::shared_ptr<torch::nn::Module> module, Rank& rank) : module_(std::move(module)), rank_(rank) {
  const torch::NoGradGuard no_grad;
  module_->to(rank_.device());

  check_that_modules_match();
  for (const auto& parameter : module_->parameters()) rank_.broadcast(parameter);
  for (const auto& buffer : module_->buffers()) rank_.broadcast(buffer);

  std::map<torch::Dtype, Bucket> by_type;
  for (const auto& item : module_->named_parameters()) {
    if (!item.value().requires_grad()) continue;
    auto& bucket = by_type[item.value().scalar_type()];
    bucket.names.push_back(item.key());
    bucket.parameters.push_back(item.value());
  }
  for (auto& [type, bucket] : by_type) {
    int64_t size = 0;
    for (const auto& parameter : bucket.parameters) size += parameter.numel();
    bucket.flat = torch::zeros({size}, torch::TensorOptions().dtype(type).device(rank_.device()));
    int64_t offset = 0;
    for (const auto& parameter : bucket.parameters) {
      // variable_data: the same memory, but no view in autograd's eyes, whose detach_() an optimizer's zero_grad()
      // could not do.
      bucket.views.push_back(bucket.flat.narrow(0, offset, parameter.numel()).view(parameter.sizes()).variable_data());
      offset += parameter.numel();
    }
    buckets_.push_back(std::move(bucket));
  }
}

void Replica::check_that_modules_match() {
  const auto parameters = module_->parameters();
  const auto tensors = static_cast<int64_t>(parameters.size() + module_->buffers().size());
  const auto address = parameters.empty() ? 0 : reinterpret_cast<int64_t>(parameters[0].const_data_ptr());
  // Row r holds what rank r has; the others add zeros.
  torch::Tensor table = torch::zeros({rank_.world_size(), 3}, torch::kLong);
  const int64_t process = rank_.process();  // an address means something within its process only
  table[rank_.index()] = torch::tensor({tensors, address, process}, torch::kLong);
  table = table.to(rank_.device());
  rank_.allreduce(table);
  table = table.cpu();
  for (int other = 0; other < rank_.world_size(); ++other) {
    const auto their_tensors = table[other][0].item<int64_t>(), their_address = table[other][1].item<int64_t>();
    if (their_tensors != tensors) {
      throw Error("DataParallel: the ranks' modules differ: rank " + std::to_string(rank_.index()) + " has " +
                  std::to_string(tensors) + " parameters and buffers, rank " + std::to_string(other) + " has " +
                  std::to_string(their_tensors) + ". Every rank must build the same module");
    }
    if (other != rank_.index() && address != 0 && their_address == address &&
        table[other][2].item<int64_t>() == process) {
      throw Error("DataParallel: ranks " + std::to_string(std::min(rank_.index(), other)) + " and " +
                  std::to_string(std::max(rank_.index(), other)) +
                  " hold the same parameters in memory, not replicas (a copy of a torch::nn::Module shares its "
                  "tensors). Build the module inside the function given to run()");
    }
  }
}

Loss Replica::loss(const std::shared_ptr<Replica>& self, torch::Tensor local_mean, int64_t local_size,
                   int64_t global_size) const {
  if (local_size < 0 || global_size < 1 || local_size > global_size) {
    throw Error("DataParallel: a part of " + std::to_string(local_size) + " samples of a global batch of " +
                std::to_string(global_size) + "; a part has 0 to all of the batch's samples, and the batch at least 1");
  }
  if (local_size == 0) local_mean = torch::zeros({}, rank_.device());
  if (!local_mean.defined() || local_mean.numel() != 1) {
    throw Error(
        "DataParallel: the loss must be one number, the mean over the part's samples; use the criterion's mean "
        "reduction");
  }
  // backward() averages over the ranks, equal weights: a part that holds more samples than the average must count for
  // more.
  const double weight = static_cast<double>(local_size) * rank_.world_size() / static_cast<double>(global_size);
  return Loss(self, std::move(local_mean), weight);
}

void Replica::backward(const torch::Tensor& local_mean, double weight) {
  // An empty part has no graph: its gradients are what they were, or zero.
  if (local_mean.requires_grad()) local_mean.backward(torch::full_like(local_mean, weight));
  if (sync) average_gradients();
}

// The average, and not the sum, because gradients of an earlier backward() that are equal on all ranks must stay what
// they are.
void Replica::average_gradients() {
  const torch::NoGradGuard no_grad;
  for (auto& bucket : buckets_) {
    for (size_t i = 0; i < bucket.parameters.size(); ++i) {
      auto& gradient = bucket.parameters[i].mutable_grad();
      auto& view = bucket.views[i];
      if (!gradient.defined()) {
        view.zero_();
      } else if (gradient.layout() != torch::kStrided) {
        throw Error("DataParallel: the gradient of " + bucket.names[i] +
                    " is sparse, which cannot be averaged; build its Embedding with sparse(false)");
      } else if (!gradient.is_alias_of(bucket.flat)) {
        view.copy_(gradient);
      }
      gradient = view;
    }
    rank_.allreduce(bucket.flat, c10d::ReduceOp::AVG);
  }
}

Loss::Loss(std::shared_ptr<Replica> replica, torch::Tensor local_mean, double weight)
    : replica_(std::move(replica)), local_mean_(std::move(local_mean)), weight_(weight) {}

void Loss::backward() {
  replica_->backward(local_mean_, weight_);
}

NoSync::NoSync(std::shared_ptr<Replica> replica) : replica_(std::move(replica)), before_(replica_->sync) {
  replica_->sync = false;
}

NoSync::~NoSync() {
  replica_->sync = before_;
}

std::shared_ptr<Replica> make_replica(std::shared_ptr<torch::nn::Module> module, Rank& rank) {
  return std::make_shared<Replica>(std::move(module), rank);
}

Loss make_loss(const std::shared_ptr<Replica>& replica, torch::Tensor local_mean, int64_t local_size,
               int64_t global_size) {
  return replica->loss(replica, std::move(local_mean), local_size, global_size);
}

}  // namespace lockstep
