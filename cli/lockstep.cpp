#include "lockstep.hpp"

#include <vector>

#include "command_line.hpp"
#include "commands.hpp"
#include "package_files.hpp"

namespace lockstep::cli {

namespace {

const char* const footer =
    "Examples:\n"
    "  lockstep train --devices 2\n"
    "  lockstep train --help, or lockstep help train\n"
    "\n"
    "Exit codes: 0 done; 1 an error; 2 wrong usage; 3 a loss that is not finite ended\n"
    "the training; 130 stopped by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP; 141 nobody\n"
    "reads the output any more.\n";

std::vector<Command> add_commands(CLI::App& program) {
  add_package_flags(program);
  return {add_train(program),   add_eval(program),       add_report(program), add_sweep(program),
          add_devices(program), add_fetch_data(program), add_plan(program),   add_launch(program)};
}

}  // namespace

int run_lockstep(int argc, char** argv) {
  return run_command_line(
      {"lockstep", "lockstep trains neural networks over several devices, on LibTorch.", footer, add_commands}, argc,
      argv);
}

}  // namespace lockstep::cli
