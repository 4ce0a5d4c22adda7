// Computes accuracy and loss of a model on a data set, on all ranks at once.
//
// The result is exact: every sample is counted once, whatever the number of ranks and the batch size (the section's
// exercise on evaluating on several devices). Call it on all ranks; each gets the whole result. It costs one forward
// per batch, or with a grain one per grain, and one small allreduce at the end.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/data/data.hpp>
#include <lockstep/ranks/rank.hpp>

#include <cstdint>
#include <functional>

namespace lockstep {

struct Score {
  int64_t correct = 0;
  int64_t total = 0;
  double loss = 0;  // mean cross-entropy over all samples

  double accuracy() const { return total == 0 ? 0.0 : static_cast<double>(correct) / static_cast<double>(total); }
};

// `forward` maps samples [n, ...] on this rank's device to logits [n, classes]; y holds class indices. Put the module
// into eval() mode first. `batch_size` counts the samples of all ranks together. With a `grain` forward gets so many
// consecutive samples at a time (at the end fewer), and the losses are added in one order. Then the loss has the same
// bits on any number of ranks and for any batch size; each rank needs one intra-op thread. Throws Error for a data set
// without samples and for a grain below 0, and as batches() and Rank::allreduce do.
Score evaluate(const std::function<at::Tensor(const at::Tensor&)>& forward, const Dataset& dataset, Rank& rank,
               int64_t batch_size = 256, int64_t grain = 0);

}  // namespace lockstep
