// Lists the settings that all processes of a launcher must have in common.
#pragma once

#include <lockstep/trainer/train_options.hpp>

#include "data/data_digests.hpp"
#include "run_state.hpp"

#include <string>

namespace lockstep {

// Tells whether the run keeps checkpoints.
bool keeps_checkpoints(const TrainOptions& options);

// Gives the settings that shape the processes' steps, as a text for run() to compare; run() knows the seed already.
std::string common_settings(const TrainOptions& options, const DataDigests& data, const RunState* resumed = nullptr);

}  // namespace lockstep
