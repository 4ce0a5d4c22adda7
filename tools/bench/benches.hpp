// The benches: each adds its command to the program lockstep-bench.
#pragma once

#include "cli/commands.hpp"

namespace lockstep::cli {

Command add_bench_allreduce(CLI::App& program);  // time and bandwidth of each allreduce, beside memcpy and the peers
Command add_bench_bits(CLI::App& program);       // whether a run with a grain has the same bits on every layout
Command add_bench_compare(CLI::App& program);    // each way to split a network, side by side
Command add_bench_grain(CLI::App& program);      // a grain's cost, in steps with and without it
Command add_bench_overlap(CLI::App& program);    // how much of the gradients' reduction hides behind backward
Command add_bench_server(CLI::App& program);     // a parameter server's modes beside allreduce
Command add_bench_step(CLI::App& program);       // DataParallel's cost in a step

}  // namespace lockstep::cli
