// Reads a program's command line, runs the command, and turns the outcome into an exit code.
#pragma once

#include <string>
#include <vector>

#include "commands.hpp"

namespace lockstep::cli {

struct CommandLine {
  std::string name, description, footer;            // texts of the program's help
  std::vector<Command> (*add_commands)(CLI::App&);  // adds the commands to the program
};

// Does the work of a program's main(). Call it once in a process.
int run_command_line(const CommandLine& line, int argc, char** argv);

}  // namespace lockstep::cli
