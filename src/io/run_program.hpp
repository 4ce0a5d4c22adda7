// Runs another program: text in, bytes out, and never longer than it may.
#pragma once

#include <lockstep/base/error.hpp>

#include <chrono>
#include <string>
#include <vector>

namespace lockstep::io {

// What run_program throws for a program that is not installed: trying again would not help.
class ProgramNotFound : public Error {
 public:
  using Error::Error;
};

// Starts `arguments`[0], found through PATH and without a shell, gives it `input` as its standard input, and returns
// what it wrote to its standard output. It runs in a process group of its own, so that Ctrl-C on the terminal does not
// reach it. Throws Error that names the program: it is not there (ProgramNotFound), it failed (with what it wrote to
// standard error), it was ended by a signal, or it took longer than `limit` and was killed.
std::string run_program(const std::vector<std::string>& arguments, const std::string& input,
                        std::chrono::milliseconds limit);

}  // namespace lockstep::io
