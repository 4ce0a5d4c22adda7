// Replica: one rank's copy of a network, equal to the other ranks', whatever its module's type is. It is what a
// DataParallel is a handle on, as parts that each do one thing.
//
// Use it from the rank's thread only.
#pragma once

#include <torch/nn/module.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/ranks/rank.hpp>

#include "backwards.hpp"
#include "counted_batches.hpp"
#include "criterion_check.hpp"
#include "gradient_buckets.hpp"
#include "hidden_gradients.hpp"
#include "loop_warnings.hpp"
#include "nn/sample_places.hpp"
#include "replica_grains.hpp"
#include "sharded_net.hpp"

#include <memory>

namespace lockstep {

// Make it by std::make_shared: a Loss and a NoSync keep it alive. Once its Rank's run() is over, backwards throw Error.
// More than twelve functions: one for each of its parts, and what a divided net adds.
class Replica {
 public:
  // See DataParallel's constructor.
  Replica(std::shared_ptr<torch::nn::Module> module, const Rank& rank, const DataParallelOptions& options);
  Replica& operator=(Replica&&) = delete;

  torch::nn::Module& module() const { return *module_; }
  Rank& rank() { return rank_; }
  const Rank& rank() const { return rank_; }

  GradientBuckets* averaging() const { return averaging_.get(); }          // null: it does not average
  const std::shared_ptr<ShardedNet>& sharded() const { return sharded_; }  // null: nothing is sharded
  SamplePlaces& places() { return places_; }
  LoopWarnings& warnings() { return warnings_; }
  ReplicaGrains& grains() { return grains_; }
  CountedBatches& counts() { return counts_; }
  CriterionCheck& criteria() { return criteria_; }
  Backwards& backwards() { return backwards_; }
  const Backwards& backwards() const { return backwards_; }

  // Tell whether ranks get slices of the gradients, for which they wait within backward; and slices of the parameters.
  // With these, forward and backward exchange, and a rank without samples computes too.
  bool divides_gradients() const { return sharded_ && sharded_->reducer()->divides_gradients(); }
  bool divides_parameters() const { return sharded_ && sharded_->divides_parameters(); }

  // Call it while an exception of a forward or a backward is handled. Throws the failure of a gather, if there was one:
  // its operator threw LibTorch's exception instead. Throws Error, with the exception nested, for one of LibTorch's
  // that names neither the tensor nor a remedy.
  void rethrow_failure() const;

  // Makes the module a part of a network, whose other parts other ranks hold. Its gradients are hidden from here on.
  void become_part();
  HiddenGradients* hidden_gradients() const { return hidden_.get(); }  // null: `.grad` has them

  // An Optimizer of the net calls these as it comes and goes. check_optimizer() throws Error if there is none and
  // nobody else could step, and if a part's Optimizer has stepped and not cleared the gradients.
  void add_optimizer() { ++optimizers_; }
  void remove_optimizer() { --optimizers_; }
  void check_optimizer() const;

 private:
  const std::shared_ptr<torch::nn::Module> module_;
  Rank rank_;
  std::shared_ptr<ShardedNet> sharded_;
  std::shared_ptr<GradientBuckets> averaging_;
  std::unique_ptr<HiddenGradients> hidden_;
  int optimizers_ = 0;
  SamplePlaces places_;
  LoopWarnings warnings_;
  ReplicaGrains grains_;
  CountedBatches counts_;
  CriterionCheck criteria_;
  Backwards backwards_;
};

}  // namespace lockstep
