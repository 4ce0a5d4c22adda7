// ShardedNet: what a replica keeps of a sharded net (ZeRO). It has the rank's slices of the parameters in flat memory,
// and the reducer that gives the slice of the averaged gradients. An Optimizer updates the slices.
//
// Use it from the rank's thread only.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <lockstep/data_parallel/options.hpp>

#include "ranks/trained_parameters.hpp"
#include "sharded_parameters.hpp"
#include "sharded_reducer.hpp"

#include <functional>
#include <memory>
#include <vector>

namespace lockstep {

class ShardedNet {
 public:
  // Moves the parameters that need a gradient into flat memory. Throws Error for options that do not go together, a
  // module without such parameters, an elastic run, and from Sharded::gradients on for a SyncBatchNorm.
  ShardedNet(torch::nn::Module& module, const Rank& rank, const DataParallelOptions& options);
  ~ShardedNet();  // drops the parameters that are not whole
  ShardedNet& operator=(ShardedNet&&) = delete;

  const std::shared_ptr<ShardedReducer>& reducer() const { return reducer_; }
  const std::vector<ShardedBucket>& buckets() const { return buckets_; }
  bool divides_parameters() const { return divided_ != nullptr; }

  // Gives the groups with this rank's slices in the place of the parameters. A group may be empty.
  std::vector<torch::optim::OptimizerParamGroup> sliced(
      const std::vector<torch::optim::OptimizerParamGroup>& groups) const;

  // Calls step(), and gathers the parameters, with Sharded::parameters when they are used. Update the slices by their
  // gradients in step(). Call it on all ranks.
  void update(const std::function<void()>& step);

  // From hold() to release() every rank has all parameters whole. Calls nest. Call hold() on all ranks.
  void hold();
  void release();
  void check_that_it_is_held() const;  // throws Error if it is not

 private:
  Rank rank_;
  const TrainedParameters parameters_;
  const std::vector<ShardedBucket> buckets_;
  const std::shared_ptr<DividedParameters> divided_;  // null: every rank has the parameters whole
  const std::shared_ptr<ShardedReducer> reducer_;
  int holds_ = 0;
};

}  // namespace lockstep
