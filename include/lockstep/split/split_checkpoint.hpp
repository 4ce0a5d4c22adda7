// Checkpoints of a SplitModel's optimizers: the whole network's state in one file, by the parameters' full names. So
// any other split, number of ranks or one device can go on from it. The weights: SplitModel::gather() and weights.hpp.
//
// All ranks must call both functions; rank 0 writes, every rank reads. The file is as optimizer_checkpoint.hpp's. Cost
// of saving: the state's bytes over the pipeline and tensor axes.
#pragma once

#include <torch/optim/optimizer.h>
#include <lockstep/split/split_model.hpp>

#include <filesystem>

namespace lockstep {

// Writes the state that the ranks' optimizers, each made of net.parameters(), have for the whole network. Throws Error
// as save_optimizer does for a module, and if a state of a sliced parameter is neither a number nor of the slice's
// shape.
void save_optimizer(const std::filesystem::path& file, const torch::optim::Optimizer& optimizer, SplitModel& net);

// Gives each rank's optimizer its part of the file, whatever the split was that wrote it. Throws Error as
// load_optimizer does for a module; only ranks that hold the parameter see another shape.
void load_optimizer(const std::filesystem::path& file, torch::optim::Optimizer& optimizer, SplitModel& net);

}  // namespace lockstep
