// explain_failure(): what LibTorch's exceptions mean for a user of DataParallel, with names.
#pragma once

#include <torch/nn/module.h>
#include <lockstep/ranks/rank.hpp>

namespace lockstep {

// Call it while an exception is handled. Throws Error, with that exception nested, if the exception names neither the
// tensor nor what to do; else returns. `of_batch_of_one`: a BatchNorm's exception for one value per channel counts too.
void explain_failure(const torch::nn::Module& module, const Rank& rank, bool of_batch_of_one);

}  // namespace lockstep
