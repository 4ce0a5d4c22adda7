// Each subcommand adds itself to the program's command line; the chosen one is then run.
#pragma once

#include <CLI/CLI.hpp>
#include <lockstep/base/version.hpp>

#include <functional>
#include <string>

#include "output.hpp"

namespace lockstep::cli {

// These are exit codes of failures that would come again: of a command line that makes no sense, and of a run whose
// loss or gradients were not finite.
inline constexpr int kWrongUsage = 2, kNotFinite = 3;

struct Command {
  CLI::App* app;                     // the subcommand's command line; parsed() tells whether the user chose it
  std::function<int(Output&)> work;  // prints to the output and returns the exit code; throws lockstep::Error
};

Command add_train(CLI::App& program);
Command add_eval(CLI::App& program);
Command add_report(CLI::App& program);
Command add_sweep(CLI::App& program);
Command add_plan(CLI::App& program);
Command add_devices(CLI::App& program);
Command add_fetch_data(CLI::App& program);
Command add_launch(CLI::App& program);

// Gives LibTorch's version, "2.15.0"; lockstep's is version().
std::string torch_version();

}  // namespace lockstep::cli
