// Sums over a data set of whatever a network's outputs and the targets give, computed on all ranks at once.
//
// With a grain they have the same bits on any number of ranks. All ranks must call it. Cost: one forward per batch, or
// with a grain one per grain, and one small allreduce at the end.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/data/data.hpp>
#include <lockstep/ranks/rank.hpp>

#include <cstdint>
#include <functional>
#include <vector>

namespace lockstep {

// (y_hat, batch) of some samples -> a sum over them, one number on their device.
using SampleSum = std::function<at::Tensor(const at::Tensor& y_hat, const Batch& batch)>;

// The sums over all `samples`, each counted once, the same on all ranks; and the rest as evaluate() has it.
std::vector<double> evaluate_sums(const std::function<at::Tensor(const Batch&)>& forward, const Samples& samples,
                                  const std::vector<SampleSum>& sums, Rank& rank, int64_t batch_size, int64_t grain);

}  // namespace lockstep
