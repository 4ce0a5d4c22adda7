// The flags of `lockstep sweep`, and the runs that they mean.
#pragma once

#include <CLI/CLI.hpp>
#include <lockstep/trainer/metrics.hpp>
#include <lockstep/trainer/trainer.hpp>

#include <string>
#include <vector>

#include "train_flags.hpp"

namespace lockstep::cli {

struct SweepFlags {
  TrainFlags train;                                                // of all runs
  std::vector<std::string> devices, batch_sizes, rates, scale_lr;  // the axes of the grid; empty: as train has it
  double target = 0.85;
  int jobs = 0;  // 0: as the cores allow
};

// A run of the grid, with what it measured.
struct SweepRun {
  TrainOptions options;
  bool is_reference = false;               // its batch is the one that the learning rate is for
  std::vector<EpochMetrics> history = {};  // of all epochs; empty while it is not finished
};

void add_flags(CLI::App& app, SweepFlags& flags);

// Makes one run per point of the grid, each in a folder of its own in the sweep's folder. With the reference batch all
// rules for the learning rate are the same, and there is no warm-up: that is one run. Throws UsageError for impossible
// runs.
std::vector<SweepRun> grid(const SweepFlags& flags);

// The name of a run's folder, which tells it from the others of its sweep: "2xcpu_batch512_lr0.1",
// "2xcpu_batch512_lr0.1_linear". It has all axes, also those with a single value, so that a larger grid finds the runs
// of a smaller one.
std::string grid_name(const TrainOptions& options);

}  // namespace lockstep::cli
