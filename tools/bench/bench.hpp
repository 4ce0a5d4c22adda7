// The program lockstep-bench: what lockstep itself costs, measured on this machine.
#pragma once

namespace lockstep::cli {

// Does main()'s work. Call it once in a process.
int run_bench(int argc, char** argv);

}  // namespace lockstep::cli
