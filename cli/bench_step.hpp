// lockstep bench step: what DataParallel adds to a step.
#pragma once

#include "commands.hpp"

namespace lockstep::cli {

Command add_bench_step(CLI::App& bench);

}  // namespace lockstep::cli
