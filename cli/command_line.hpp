// The program lockstep: reads the command line, runs the command, and turns what happens into an exit code.
#pragma once

namespace lockstep::cli {

// What main() does. To be called once in a process.
int run_command_line(int argc, char** argv);

}  // namespace lockstep::cli
