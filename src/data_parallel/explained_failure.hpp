// explain_failure(): what LibTorch's exceptions mean for a user of DataParallel, with names.
#pragma once

#include <torch/nn/module.h>
#include <lockstep/ranks/rank.hpp>

namespace lockstep {

// While an exception is handled: throws Error, with the exception nested, if it is one of those that name neither the
// tensor nor what to do. Else returns. `of_batch_of_one` says whether that of a BatchNorm is among them.
void explain_failure(const torch::nn::Module& module, const Rank& rank, bool of_batch_of_one);

}  // namespace lockstep
