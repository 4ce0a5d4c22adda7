// lockstep bench bits: whether a run with a grain gives the same bits on every layout of its ranks.
#pragma once

#include "commands.hpp"

namespace lockstep::cli {

Command add_bench_bits(CLI::App& bench);

}  // namespace lockstep::cli
