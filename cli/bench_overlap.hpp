// lockstep bench overlap: how much of the gradients' reduction hides behind backward.
#pragma once

#include "commands.hpp"

namespace lockstep::cli {

Command add_bench_overlap(CLI::App& bench);

}  // namespace lockstep::cli
