// Computes losses and metrics of a model on a data set, on all ranks at once: any Criterion, not of classes alone.
//
// The results are exact: every sample is counted once, whatever the number of ranks and the batch size. Call it on all
// ranks; each gets all results. It costs one forward per batch, or with a grain one per grain, and two small allreduces
// at the end.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data/samples.hpp>
#include <lockstep/data_parallel/criterion.hpp>
#include <lockstep/ranks/rank.hpp>

#include <cstdint>
#include <functional>
#include <vector>

namespace lockstep {

// Gives the mean of each criterion over all samples. `forward` maps a batch on this rank's device to y_hat; put the
// module into eval() mode first. A criterion gives one number, the mean over some samples, or a value for each of them
// [n]. A MeanOver gives the mean over tokens, pixels or whatever else is counted. Sums and counts may also be rows with
// a number for each class [classes]. Then the result is a macro mean: the mean of sum / count over the classes that are
// counted at all; NaN if nothing is. The first batch is checked as Criterion says.
// `batch_size` and `grain` are as for evaluate() of classes. Throws Error for no samples, and for a
// criterion that gives something else, with its place in `criteria`.
//
//   const auto accuracy = [](auto& y_hat, auto& y) { return y_hat.argmax(1) == y; };
//   const auto means = lockstep::evaluate(forward, test, {F::mse_loss, accuracy}, rank);
std::vector<double> evaluate(const std::function<at::Tensor(const Batch& batch)>& forward, const Samples& samples,
                             const std::vector<Criterion>& criteria, Rank& rank, int64_t batch_size = 256,
                             int64_t grain = 0);

}  // namespace lockstep
