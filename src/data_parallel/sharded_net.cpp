#include "sharded_net.hpp"

#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/sync_batch_norm.hpp>

#include "divided_parameters.hpp"
#include "ranks/rank_place.hpp"

#include <map>
#include <string>
#include <utility>

namespace lockstep {
namespace {

void check(const torch::nn::Module& module, const TrainedParameters& parameters, const Rank& rank,
           const DataParallelOptions& options) {
  const auto refuse = [&](const std::string& why) { throw Error(rank.name() + ": DataParallel: " + why); };
  if (comm::RankPlace::of(rank).run->succession != nullptr) {
    refuse(
        "in an elastic run a slice of the optimizer is lost with its process. Leave `sharded` at Sharded::nothing; or "
        "leave RunOptions::succession out, let lockstep launch start all processes again when one is lost "
        "(`max_restarts`), and go on from your newest checkpoint");
  }
  if (!options.average) {
    refuse("`average` is false, and a net that is sharded averages its gradients; leave one of the two out");
  }
  if (options.hook) {
    refuse(
        "a communication hook averages whole gradients, and in a net that is sharded each rank gets a slice; leave out "
        "`hook`, or `sharded`");
  }
  if (options.sharded == Sharded::parameters && options.grain_check) {
    refuse(
        "a grain_check has a grain computed again by one rank, which needs all parameters, and with "
        "Sharded::parameters each rank keeps a slice of them. Take Sharded::gradients, or leave out the check");
  }
  if (options.bucket_bytes < 1) {
    refuse("bucket_bytes is " + std::to_string(options.bucket_bytes) + "; it must be at least 1");
  }
  if (options.sharded != Sharded::state && has_sync_batchnorm(module)) {
    refuse(
        "the net has a SyncBatchNorm, in whose backward ranks wait for each other, as they do for sharded gradients; "
        "together they could wait in a circle. Take Sharded::state");
  }
  if (parameters.all().empty()) refuse("there is no parameter that needs a gradient, so that nothing can be sharded");
}

std::vector<ShardedBucket> buckets_of(const torch::nn::Module& module, const TrainedParameters& parameters,
                                      const Rank& rank, const DataParallelOptions& options) {
  check(module, parameters, rank, options);
  if (options.sharded == Sharded::parameters) return shard_in_units(parameters.all(), options, rank);
  return shard_parameters(parameters.all(), rank, options.bucket_bytes);
}

std::shared_ptr<DividedParameters> divided_of(const std::vector<ShardedBucket>& buckets, const Rank& rank,
                                              const DataParallelOptions& options) {
  if (options.sharded != Sharded::parameters) return nullptr;
  return std::make_shared<DividedParameters>(buckets, rank, options.overlap);
}

}  // namespace

ShardedNet::ShardedNet(torch::nn::Module& module, const Rank& rank, const DataParallelOptions& options)
    : rank_(rank),
      parameters_(module),
      buckets_(buckets_of(module, parameters_, rank_, options)),
      divided_(divided_of(buckets_, rank_, options)),
      reducer_(std::make_shared<ShardedReducer>(buckets_, rank_, options, divided_)) {}

ShardedNet::~ShardedNet() {
  if (!divided_) return;
  divided_->end(rank_.name() +
                ": the DataParallel that sharded these parameters among the ranks is gone, and they with it; save them "
                "before that, while a whole() lives, and load them into a new net");
}

std::vector<torch::optim::OptimizerParamGroup> ShardedNet::sliced(
    const std::vector<torch::optim::OptimizerParamGroup>& groups) const {
  parameters_.check(rank_, "DataParallel", "would be neither averaged nor used");
  std::map<const c10::TensorImpl*, const ShardedBucket::Slice*> slice_of;
  for (const auto& bucket : buckets_) {
    for (const auto& place : bucket.places) slice_of.emplace(place.parameter.unsafeGetTensorImpl(), &place.slice);
  }
  std::vector<torch::optim::OptimizerParamGroup> of_slices;
  for (const auto& group : groups) {
    std::vector<at::Tensor> slices;
    for (const auto& parameter : group.params()) {
      const auto found = slice_of.find(parameter.unsafeGetTensorImpl());
      if (found == slice_of.end()) continue;  // it was frozen when the net was made
      if (found->second->size > 0) slices.push_back(found->second->values);
    }
    of_slices.emplace_back(std::move(slices));
    if (group.has_options()) of_slices.back().set_options(group.options().clone());
  }
  return of_slices;
}

void ShardedNet::update(const std::function<void()>& step) {
  const c10::NoGradGuard no_grad;
  parameters_.check(rank_, "DataParallel", "would be neither averaged nor used");
  reducer_->use();
  if (divided_) divided_->put_away();
  step();
  for (auto& [name, slice] : slices_of(buckets_)) slice.mutable_grad().reset();
  if (divided_) return divided_->bring_back();
  std::vector<std::pair<at::Tensor, at::Tensor>> values;
  for (const auto& bucket : buckets_) values.emplace_back(bucket.values, bucket.slice);
  gather_slices(values, rank_);
}

void ShardedNet::hold() {
  if (divided_) divided_->hold();
  ++holds_;
}

void ShardedNet::release() {
  --holds_;
  if (divided_) divided_->release();
}

void ShardedNet::check_that_it_is_held() const {
  if (holds_ > 0) return;
  throw Error(rank_.name() +
              ": DataParallel: the net is sharded, so its module's parameters have no gradients, and may not be whole. "
              "Step and clip with a lockstep::Optimizer(net, …); call net.train() and net.eval(); and reach the module "
              "(`net->`, `*net`) within loss(), while a net.samples(batch) lives, or while a net.whole() does, which "
              "all ranks make");
}

}  // namespace lockstep
