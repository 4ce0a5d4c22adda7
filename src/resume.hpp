// Which checkpoint a run goes on from, and whether it is one of the same run.
#pragma once

#include <lockstep/trainer.hpp>

#include <filesystem>
#include <optional>

#include "run_state.hpp"

namespace lockstep {

// A checkpoint file as it is; of a run's folder, its newest. Throws Error if there is none.
std::filesystem::path checkpoint_of(const std::filesystem::path& file_or_run);

// The folder of the run that the checkpoint belongs to; empty if it does not lie in one.
std::filesystem::path run_of(const std::filesystem::path& checkpoint);

// The run folder in `runs_dir` that has the newest checkpoint. Throws Error if none has one.
std::filesystem::path last_run(const std::filesystem::path& runs_dir);

// What options.resume says to go on from; none if it is empty. Throws Error as train() does.
std::optional<RunState> resumed_state(const TrainOptions& options);

}  // namespace lockstep
