// CriterionCheck: finds a criterion that is no mean over samples, before its average over the ranks trains another
// network than one device would. It looks at the first losses of each kind of criterion, on one rank too.
//
// Use it from the rank's thread only. Cost: in each loss that is looked at, two more calls of the criterion without
// gradients. The host waits for a GPU there.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/data_parallel/criterion.hpp>
#include <lockstep/ranks/rank.hpp>

#include <map>
#include <typeindex>

namespace lockstep {

class CriterionCheck {
 public:
  explicit CriterionCheck(const Rank& rank) : rank_(rank) {}

  // Gives the criterion's loss of y_hat and the batch, with its graph. Calls the criterion on both halves of the
  // samples too. Throws Error if the mean of the two is another one. Leaves out what cannot be cut: a criterion that
  // calls other ranks, draws random numbers, changes its arguments or throws for a half, and a y_hat without a row for
  // each sample.
  at::Tensor loss(const Criterion& criterion, const at::Tensor& y_hat, const Batch& batch);

 private:
  bool is_due(const Criterion& criterion, const at::Tensor& y_hat, const Batch& batch);
  void compare(const Criterion& criterion, const at::Tensor& y_hat, const Batch& batch, const at::Tensor& mean) const;

  Rank rank_;
  std::map<std::type_index, int> losses_;  // the numbers of losses that were looked at, by the type of the criterion
};

}  // namespace lockstep
