// What a sweep found: a table and a plot of its finished runs.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "sweep_grid.hpp"

namespace lockstep::cli {

// Markdown, aligned to be read as it is: what the runs have in common, and of each its place in the grid, the learning
// rate that its rule makes, its last and best test accuracy, after how many epochs and seconds of training it first was
// `target`, seconds per epoch and last train loss. "-" for what never was.
std::string sweep_table(const std::vector<SweepRun>& runs, double target);

// The last test accuracies, as an SVG: over the learning rate, a line per devices, batch and rule; or, if the grid has
// more batch sizes than learning rates, over the batch, a line per devices, learning rate and rule. Throws Error as
// draw_curve does.
void draw_sweep(const std::filesystem::path& file, const std::vector<SweepRun>& runs);

}  // namespace lockstep::cli
