// Runs another program that gives bytes, and stops it when the time is over.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace lockstep::cli {

// Starts `arguments`[0], found through PATH and without a shell, with an empty standard input, and returns its standard
// output. The program runs in another process group, so Ctrl-C on the terminal does not reach it. Throws Error, which
// names a program that is not there, failed (with its standard error), was ended by a signal, or took longer than
// `limit` and was killed. The process takes the default for SIGCHLD from then on.
std::string run_program(const std::vector<std::string>& arguments, std::chrono::milliseconds limit);

}  // namespace lockstep::cli
