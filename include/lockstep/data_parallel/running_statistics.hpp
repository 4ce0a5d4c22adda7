// average_running_statistics: gives all ranks one set of running statistics, where each BatchNorm has followed its own
// rank's samples.
//
// Without SyncBatchNorm every rank's running mean and variance follow its own parts of the batches. But one network is
// evaluated or kept. So all ranks take the mean of their statistics, weighted by each rank's number of samples: all
// samples count the same. The mean of the parts' (unbiased) variances is an unbiased estimate of the variance
// (docs/decisions/0010). Use the function from its rank's thread only. Cost: two small allreduces.
#pragma once

#include <torch/nn/module.h>
#include <lockstep/ranks/rank.hpp>

#include <cstdint>

namespace lockstep {

class TrainedNet;

// Changes all buffers of `module` that are named running_mean or running_var, as in LibTorch's BatchNorm and
// InstanceNorm. num_batches_tracked becomes the largest of all ranks'. Other buffers stay as they are. `samples` is the
// number of samples on which this rank has trained since the ranks' statistics were last equal. If no rank has any,
// nothing changes. Call it on all ranks, with equal modules, for example before evaluate(). Throws Error if `samples`
// is negative, and as Rank::allreduce does.
void average_running_statistics(torch::nn::Module& module, Rank& rank, int64_t samples);

// Does the same for a DataParallel or a SplitModel. Call it on all ranks along the data axis, with equal modules.
void average_running_statistics(TrainedNet& net, int64_t samples);
template <class Net>
requires requires(const Net& net) {
  net.trained();
}
void average_running_statistics(const Net& net, int64_t samples) {
  average_running_statistics(*net.trained(), samples);
}

}  // namespace lockstep
