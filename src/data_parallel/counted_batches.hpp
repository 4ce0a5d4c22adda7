// CountedBatches: counts what a MeanOver divides by, over all ranks and parts of a whole batch, before any loss of the
// batch is computed. So each part's sum becomes a mean over samples, which all else averages as it is: whole batches,
// parts, grains, microbatches, slices.
//
// Use it from the rank's thread only. Cost: an allreduce of two numbers per whole batch, or with a grain of one number
// per grain; on a GPU nothing waits.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/data_parallel/criterion.hpp>
#include <lockstep/ranks/rank.hpp>

namespace lockstep {

class CountedBatches {
 public:
  explicit CountedBatches(const Rank& rank) : rank_(rank) {}

  // Gives the batch with Batch::samples_per_count by `of`, for the next loss of it. Call it on all ranks, as often for
  // each part of a batch. Ranks may have cut theirs into other numbers of parts. Throws Error: a count that is not one
  // number; parts that do not make up the whole batch, or whose targets were changed since it was cut.
  Batch counted(const Batch& batch, const MeanOver::Count& of);

 private:
  void check_targets(const Batch& part) const;
  at::Tensor samples_per_count(const Batch& whole, const MeanOver::Count& of);
  at::Tensor counts_here(const Batch& whole, const MeanOver::Count& of) const;

  Rank rank_;
  int checked_ = 0;  // the number of whole batches that were checked on a GPU
};

}  // namespace lockstep
