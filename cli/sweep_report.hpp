// The results of a sweep: a table and a plot of its finished runs.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "sweep_grid.hpp"

namespace lockstep::cli {

// A table in aligned Markdown. First it says what the runs have in common. For each run it shows its place in the grid,
// the learning rate that its rule makes, its last and best test accuracy, seconds per epoch and last train loss. It
// also says after how many epochs and seconds of training a run first reached `target`. "-" means never.
std::string sweep_table(const std::vector<SweepRun>& runs, double target);

// Draws the last test accuracies as an SVG, over the learning rate, with a line per devices, batch and rule. If the
// grid has more batch sizes than learning rates, it draws over the batch, with a line per devices, learning rate and
// rule. Throws Error as draw_curve does.
void draw_sweep(const std::filesystem::path& file, const std::vector<SweepRun>& runs);

}  // namespace lockstep::cli
