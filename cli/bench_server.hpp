// lockstep bench server: a parameter server's modes beside allreduce, in throughput and in loss over time.
#pragma once

#include "commands.hpp"

namespace lockstep::cli {

Command add_bench_server(CLI::App& bench);

}  // namespace lockstep::cli
