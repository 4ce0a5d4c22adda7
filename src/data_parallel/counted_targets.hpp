// Notices a mean that is not over all of a part's targets: cross_entropy's and nll_loss's divide by the targets that
// ignore_index leaves in, and by the weights of classes. The average of the parts' means is then not the whole batch's.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace lockstep {

inline constexpr const char* kHowWithANet =
    "Give the weights or the ignore_index, -100 too, with the loss: net.loss(batch, F::cross_entropy, options). "
    "Or give MeanOver(sum, of) the loss's sum (reduction torch::kSum), and what to divide by. fit() takes both too";

// `mean` is the loss of a part with so many samples, of a larger batch. Its graph is looked at near the root. Throws
// Error, which begins with `name` and says `how` to compute the loss, for a mean over a number of targets that is no
// multiple of `samples`. With equally many of each sample left out the average is right. If the caller counts targets
// by hand, `samples` is their number. Losses of bfloat16 and half are not looked at. The host waits for a GPU. Cost:
// about a microsecond.
void check_counted_targets(const at::Tensor& mean, int64_t samples, const std::string& name,
                           const std::string& how = kHowWithANet);

}  // namespace lockstep
