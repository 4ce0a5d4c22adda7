// Has the flags of lockstep sweep, and the runs that these mean.
#pragma once

#include <CLI/CLI.hpp>
#include <lockstep/trainer/trainer.hpp>

#include <string>
#include <vector>

#include "train_flags.hpp"

namespace lockstep::cli {

struct SweepFlags {
  TrainFlags train;                                                // the flags of all runs
  std::vector<std::string> devices, batch_sizes, rates, scale_lr;  // the grid's axes; empty: the value of train
};

// Has a run of the grid, with its measures.
struct SweepRun {
  TrainOptions options;
  TrainResult result = {};  // the result; without history the run is not finished
};

void add_flags(CLI::App& app, SweepFlags& flags);

// Makes one run per point of the grid, each in a folder of its own in the sweep's folder. With the reference batch all
// rules for the learning rate are the same, and there is no warm-up: these rules make one run. Throws UsageError for
// impossible runs.
std::vector<SweepRun> grid(const SweepFlags& flags);

}  // namespace lockstep::cli
