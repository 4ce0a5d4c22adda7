// ReplicaWatch compares the ranks' weights and optimizer states in a run's steps, as TrainOptions::check_replicas says.
// With grains it also compares BatchNorm's running statistics, which are each rank's own otherwise. What one rank alone
// has must not change between two updates.
//
// It compares before the update, so that a step with gradients of a wrong replica changes nothing: the ranks then hold
// the state after the step before. With local SGD, where replicas are equal between rounds alone, it compares after the
// step that ends a round. Each epoch's end has a comparison too, so that N steps in a row always have one, also across
// the border of two epochs. Use a ReplicaWatch from its rank's thread. Cost: see check_replicas.hpp; with two ranks,
// and for what one rank alone has, twice that.
#pragma once

#include <lockstep/split/split_model.hpp>
#include <lockstep/trainer/train_options.hpp>

#include "data_parallel/replica_check.hpp"
#include "step_traffic.hpp"
#include "update.hpp"

#include <cstdint>
#include <vector>

namespace lockstep {

class ReplicaWatch {
 public:
  // `traffic` leaves out the comparisons' bytes.
  ReplicaWatch(const TrainOptions& options, const SplitModel& net, const Update& update, StepTraffic& traffic);

  // Call these three on all ranks, in each step; `number` counts the epoch's steps from 1. They throw ReplicasDiffer.
  void begin_step(int64_t number) { number_ = number; }
  void before_update();
  void after_update();

  void end_epoch();  // call it on all ranks; with check_replicas -1 only this call compares

 private:
  bool compares_in(int64_t step) const { return every_ > 0 && step % every_ == 0; }
  bool compares_after_round() const;
  void compare();
  void check_memory();

  const int64_t every_;
  const bool has_grains_;
  const int64_t round_;  // steps of a round of local SGD; 0: ranks average gradients
  SplitModel net_;
  const Update& update_;
  StepTraffic& traffic_;
  int64_t number_ = 0;
  // The last update left these:
  std::vector<int64_t> noted_;  // hashes of the replica; two ranks have no majority, and need them
  MemoryWatch alone_;
};

}  // namespace lockstep
