// Makes what a package has beside the program, from the same table of commands and flags as the help.
#pragma once

#include <CLI/CLI.hpp>

namespace lockstep::cli {

// Adds --cmake-dir, --completion and --man-page, which print and exit. Keep `program` alive while it is parsed.
void add_package_flags(CLI::App& program);

}  // namespace lockstep::cli
