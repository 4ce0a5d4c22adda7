// convert_sync_batchnorm: makes a network's BatchNorms normalise over the samples of all ranks, as one device's do.
//
// sync_batch_norm.hpp, which lockstep.hpp does not include, has the layer and its cost.
#pragma once

#include <torch/nn/module.h>
#include <lockstep/ranks/rank.hpp>

#include <cstdint>

namespace lockstep {

// Replaces each BatchNorm1d, 2d and 3d that is a layer of a torch::nn::Sequential or of a LayerHolder
// (layer_holder.hpp), however deep in `module`. The new layer is a SyncBatchNorm over all of `rank`'s ranks, with a
// group of its own. It takes over the tensors, not copies (so optimizers stay valid), the options and the mode. Returns
// the number of replaced layers. Call it on all ranks with equal modules, before these are trained. Throws Error,
// before anything is changed, for a BatchNorm in another place, such as a module's own member: C++ cannot replace it by
// another type. The text names it; build that module with a SyncBatchNorm.
int64_t convert_sync_batchnorm(torch::nn::Module& module, Rank& rank);

}  // namespace lockstep
