// GrainLosses: the sum of an epoch's losses, with the same bits however the grains are spread over the ranks.
//
// A step has a row with a cell for each grain of the batch. A rank fills the cells of its own grains, and the others
// stay zero. So the sum of the ranks' rows is exact: each cell has one rank's value. The cells are then added in one
// order, grain by grain and step after step. Used by its rank's thread only. Nothing waits for the device but sum().
#pragma once

#include <lockstep/ranks/rank.hpp>

#include <cstdint>
#include <vector>

namespace lockstep {

class GrainLosses {
 public:
  explicit GrainLosses(const c10::Device& device) : device_(device) {}

  void reset(double sum = 0);
  void begin_step(int64_t grains);  // `grains`: those of the whole batch
  void add(int64_t grain, const at::Tensor& mean, int64_t samples_of_it);
  void drop_step();  // makes the last step count for nothing

  // The sum of all losses since reset(), and of what that was given. Call it on all ranks after the same step.
  double sum(Rank& rank);

  // The same in two halves, between which the caller adds up the ranks' cells: those of the steps since the last
  // take(), and the sum of all losses after these.
  at::Tensor cells() const;  // double [grains]
  double take(const at::Tensor& cells);

 private:
  const c10::Device device_;
  double sum_ = 0;                // sum of the steps before those of rows_
  std::vector<at::Tensor> rows_;  // double [grains]
};

}  // namespace lockstep
