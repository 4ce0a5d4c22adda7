// Finds the checkpoint that a run goes on from, and checks that it is one of the same run.
#pragma once

#include <lockstep/trainer/trainer.hpp>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "run_state.hpp"

namespace lockstep {

using Warn = std::function<void(const std::string&)>;

// Gives the checkpoint that `file_or_run` means. A file means itself. A run's folder means its newest whole checkpoint;
// `warn` is told of a newer one that is damaged. Throws Error if there is none.
std::filesystem::path checkpoint_of(const std::filesystem::path& file_or_run, const Warn& warn);

// Gives the folder of the run that the checkpoint belongs to; empty if it does not lie in one.
std::filesystem::path run_of(const std::filesystem::path& checkpoint);

// Does the same as run_of, and gives a run's folder itself.
std::filesystem::path run_to_go_on(const std::filesystem::path& file_or_run);

// Gives the run folder in `runs_dir` that has the newest checkpoint. Throws Error if none has one.
std::filesystem::path last_run(const std::filesystem::path& runs_dir);

// Replaces keep.resume "auto" in the options: by run_dir if it has a checkpoint, or else by nothing. Then the process
// with index 0 removes what a run that was killed early left there. Throws Error for "auto" without a run_dir.
TrainOptions with_resume_found(TrainOptions options, const Warn& warn);

// Reads the state that options.keep.resume names; none if that is empty. Throws Error as train() does.
std::optional<RunState> resumed_state(const TrainOptions& options, const Warn& warn);

// Throws Error if the run had other data than these `samples` training samples of `source`, or if its position does not
// exist in this run.
void check_fits(const RunState& state, const TrainOptions& options, int64_t samples, const std::string& source,
                const DataDigests& digests);

}  // namespace lockstep
