// explain_failure() tells a user of DataParallel in names what LibTorch's exceptions mean.
#pragma once

#include <torch/nn/module.h>
#include <lockstep/ranks/rank.hpp>

namespace lockstep {

// Call it while an exception is handled. Throws Error, with that exception nested, if the exception names neither the
// tensor nor what to do; else returns. `of_batch_of_one`: a BatchNorm's exception for one value per channel counts too.
void explain_failure(const torch::nn::Module& module, const Rank& rank, bool of_batch_of_one);

}  // namespace lockstep
