// The program lockstep: reads the command line, runs the command, and turns the outcome into an exit code.
#pragma once

namespace lockstep::cli {

// Does main()'s work. Call it once in a process.
int run_command_line(int argc, char** argv);

}  // namespace lockstep::cli
