// The settings that all processes of a launcher must have in common.
#pragma once

#include <lockstep/trainer/train_options.hpp>

#include "data/data_digests.hpp"
#include "run_state.hpp"

#include <string>

namespace lockstep {

// Whether the run keeps checkpoints.
bool keeps_checkpoints(const TrainOptions& options);

// All that shapes the steps of the processes, as a text that run() compares, but for the seed, which it knows.
std::string common_settings(const TrainOptions& options, const DataDigests& data, const RunState* resumed = nullptr);

}  // namespace lockstep
