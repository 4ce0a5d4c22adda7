// average_running_statistics: one set of running statistics for all ranks, where each BatchNorm has followed its own.
//
// Without SyncBatchNorm every rank's running mean and variance follow the rank's own parts of the batches. What is
// evaluated or kept is one network, so all ranks take the ranks' mean, weighted by the samples that each has seen: all
// samples count the same, none is lost, and the mean of the parts' (unbiased) variances is an unbiased estimate of the
// variance (docs/decisions/0010). Used by its rank's thread only. Cost: two small allreduces.
#pragma once

#include <torch/nn/module.h>
#include <lockstep/ranks/rank.hpp>

#include <cstdint>

namespace lockstep {

// Changes all buffers of `module` that are named running_mean or running_var, as those of LibTorch's BatchNorm and
// InstanceNorm are; num_batches_tracked becomes the largest of all ranks'. Other buffers stay as they are. `samples`:
// how many this rank has trained on since the ranks' statistics were last equal; if no rank has any, nothing changes.
// All ranks must call it, with equal modules, for example before evaluate(). Throws Error: a negative number of
// samples; and as Rank::allreduce does.
void average_running_statistics(torch::nn::Module& module, Rank& rank, int64_t samples);

}  // namespace lockstep
