// CriterionCheck: finds a criterion that is no mean over samples, before its average over the ranks trains another
// network than one device would. It checks the first three losses of each C++ type of criterion in each net, on one
// rank too.
//
// Use it from the rank's thread only. Cost: in each loss that is looked at, two more calls of the criterion without
// gradients. The host waits for a GPU there.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/data_parallel/criterion.hpp>
#include <lockstep/ranks/rank.hpp>

#include <deque>
#include <string>
#include <typeindex>

namespace lockstep {

// Gives the criterion's value of y_hat and the batch. Then computes the values of both halves of the samples too,
// without gradients, and throws Error if their mean is another one. Sets `compares` to false once this was done. Leaves
// out what cannot be cut: a single sample; a y_hat or targets without a row for each sample; a criterion that calls
// other ranks, draws random numbers, changes its arguments or throws for a half. `what` names the criterion in the
// error, and `option` the option that gave it.
at::Tensor compared_with_halves(const Criterion& criterion, const at::Tensor& y_hat, const Batch& batch,
                                const Rank& rank, const std::string& what, const std::string& option, bool& compares);

class CriterionCheck {
 public:
  explicit CriterionCheck(const Rank& rank) : rank_(rank) {}

  // Gives the criterion's loss of y_hat and the batch, with its graph, and checks the mean of the halves. Leaves out
  // what cannot be cut: a criterion that calls other ranks, draws random numbers, changes its arguments or throws for a
  // half, and a y_hat without a row for each sample.
  at::Tensor loss(const Criterion& criterion, const at::Tensor& y_hat, const Batch& batch);

 private:
  struct Losses {
    std::type_index type;  // the criterion's type in C++
    int checked = 0;
    int seen = 0;  // another rank's random numbers may hide that a criterion draws none
  };
  Rank rank_;
  std::deque<Losses> losses_;  // the counts of each type. They stay in place while a criterion computes another loss
};

}  // namespace lockstep
