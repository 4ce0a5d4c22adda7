// Runs the program lockstep.
#pragma once

namespace lockstep::cli {

// Does main()'s work. Call it once in a process.
int run_lockstep(int argc, char** argv);

}  // namespace lockstep::cli
