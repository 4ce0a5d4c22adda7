// lockstep bench grain: what a grain costs, in steps with and without it.
#pragma once

#include "commands.hpp"

namespace lockstep::cli {

Command add_bench_grain(CLI::App& bench);

}  // namespace lockstep::cli
