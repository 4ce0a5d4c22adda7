// Backwards: runs a replica's backwards. It says which backwards are averaged, and of which batch each is, and refuses
// wrong ones.
//
// Use it from the rank's thread only.
#pragma once

#include <torch/nn/module.h>
#include <lockstep/data_parallel/loss.hpp>

#include "part_sizes.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_set>
#include <vector>

namespace lockstep {

class Backwards {
 public:
  explicit Backwards(Replica& replica);

  // See DataParallel::backward_through. The sizes are those of the rank's part, and of the batch that all ranks' parts
  // make up. By grains `runs` are Batch::runs; call ReplicaGrains::backward() in compute() for each grain of this rank,
  // ascending.
  void run(const std::function<void()>& compute, const PartSizes& sizes = {}, const std::vector<int64_t>& runs = {});

  bool syncs() const { return no_syncs_ == 0; }      // false: a NoSync lives
  bool was_by_grains() const { return by_grains_; }  // the last backward was by grains

  // Lets a caller time backwards, as Balance does. computed() runs when this rank has queued (on the CPU: computed) its
  // own work of a backward, and is about to wait for the other ranks. averaged() runs when the gradients are averaged.
  // Neither runs under no_sync. Throws Error: somebody watches already; the replica does not average, or waits within
  // backward.
  void watch(std::function<void()> computed, std::function<void()> averaged);
  void stop_watching() noexcept { computed_ = averaged_ = nullptr; }

 private:
  friend class NoSync;
  friend class PartOfStep;
  void check(PartSizes& sizes);
  bool has_new_parameter(const torch::nn::Module& module) const;
  void check_that_no_parameter_is_new() const;
  void compute_all(const std::function<void()>& compute, PartSizes sizes);
  void average(const std::function<void()>& computes, PartSizes sizes);
  void count_no_sync(int change);

  Replica& replica_;
  const std::unordered_set<const c10::TensorImpl*> parameters_;  // the parameters when the replica was made
  int no_syncs_ = 0;                                             // the number of NoSyncs that live
  bool partial_ = false;                                         // true while a PartOfStep lives
  bool by_grains_ = false;                                       // see was_by_grains()
  int64_t backwards_alone_ = 0;                                  // the backwards of a single rank without grains
  bool waiting_is_known_ = true;                                 // all parts of waiting_ are numbers of samples
  int64_t waiting_ = 0;                        // samples of the parts that the next averaged backward averages too
  std::function<void()> computed_, averaged_;  // see watch(); empty: nobody watches
};

// `accumulate` uses it where ranks get slices of the gradients. While one lives, each backward() is of a part of a
// step: it is averaged at once. The averages add up, together with that of the next backward() outside. Make as many on
// all ranks. So no rank keeps gradients whole, as it does under NoSync; each part costs an exchange.
class PartOfStep {
 public:
  explicit PartOfStep(std::shared_ptr<Replica> replica);
  ~PartOfStep();
  PartOfStep& operator=(PartOfStep&&) = delete;

 private:
  std::shared_ptr<Replica> replica_;
};

}  // namespace lockstep
