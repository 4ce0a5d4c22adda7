// Computes sums over a data set of any function of a network's outputs and the targets, on all ranks at once.
//
// With a grain the sums have the same bits on any number of ranks. Call it on all ranks. It costs one forward per
// batch, or with a grain one per grain, and two small allreduces at the end.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/data/data.hpp>
#include <lockstep/ranks/rank.hpp>

#include <cstdint>
#include <functional>
#include <vector>

namespace lockstep {

// Maps (y_hat, batch) of some samples to a sum over the samples: one number on their device, or as many each time.
using SampleSum = std::function<at::Tensor(const at::Tensor& y_hat, const Batch& batch)>;

// Gives the numbers of each sum over all `samples`, each sample counted once, the same on all ranks. All else is as for
// evaluate().
std::vector<std::vector<double>> evaluate_sums(const std::function<at::Tensor(const Batch&)>& forward,
                                               const Samples& samples, const std::vector<SampleSum>& sums, Rank& rank,
                                               int64_t batch_size, int64_t grain);

}  // namespace lockstep
