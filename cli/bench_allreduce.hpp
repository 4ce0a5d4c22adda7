// lockstep bench allreduce: time and bandwidth of each allreduce, by size, beside memcpy and the peers.
#pragma once

#include "commands.hpp"

namespace lockstep::cli {

Command add_bench_allreduce(CLI::App& bench);

}  // namespace lockstep::cli
