// ReplicaGrains: computes a replica's grains, one at a time, and stand-ins where other ranks have more of them.
//
// Use it from the rank's thread only.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/data/data.hpp>
#include <lockstep/nn/sample_scope.hpp>

#include "grain_check.hpp"
#include "grain_statistics.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace lockstep {

class Replica;

class ReplicaGrains {
 public:
  using MeanOf = GrainCheck::MeanOf;
  ReplicaGrains(Replica& replica, std::shared_ptr<GrainCheck> check);

  // Checks the batch with a grain that is computed next, and returns it with the defaults filled in. See
  // DataParallel::loss for what it refuses.
  Batch checked(const Batch& batch);

  // Calls mean_of(grain), for the mean loss of the grain's samples. Drop a stand-in's mean. Running statistics wait for
  // finish(), and a stand-in leaves all buffers as they are.
  at::Tensor mean_of_grain(const Batch& grain, SampleScope::Place place, const MeanOf& mean_of);
  at::Tensor mean_of_stand_in(const Batch& part, SampleScope::Place place, const MeanOf& mean_of);
  // Gives how often this rank computes a stand-in, so that all ranks compute the layers equally often.
  int64_t stand_ins_of(const Batch& part) const;

  // Computes the forward or the backward of a grain, for callers that compute them alone, as a pipeline does.
  // `stand_ins` follow in the same backward.
  void forward(int64_t number, const std::function<void()>& forward);
  void backward(int64_t number, const std::function<void()>& backward, int64_t stand_ins = 0);

  // Call it after the step's last backward.
  void finish(const std::vector<int64_t>& runs) { statistics_->finish(runs); }
  bool is_in_forward() const { return statistics_ && statistics_->is_open(); }
  GrainCheck* check() const { return check_.get(); }  // null: none was asked for

 private:
  void refuse_what_depends_on_ranks() const;
  void check_place(const Batch& whole, const Batch& batch) const;

  Replica& replica_;
  const std::shared_ptr<GrainCheck> check_;
  std::unique_ptr<GrainStatistics> statistics_;  // null before the first batch with a grain
};

}  // namespace lockstep
