// Runs another program that takes text and gives bytes, and stops it when its time is over.
#pragma once

#include <lockstep/base/error.hpp>

#include <chrono>
#include <string>
#include <vector>

namespace lockstep::io {

// run_program throws ProgramNotFound if a program is not installed: trying again would not help.
class ProgramNotFound : public Error {
 public:
  explicit ProgramNotFound(const std::string& text) : Error(text, {Error::machine}) {}
};

// Starts `arguments`[0], found through PATH and without a shell. Gives the program `input` as standard input, and
// returns its standard output. The program runs in a process group of its own, so Ctrl-C on the terminal does not reach
// it. Throws Error, which names the program, if it is not there (ProgramNotFound), if it failed (with its standard
// error), if a signal ended it, or if it took longer than `limit` and was killed. Where this process ignores SIGCHLD,
// nobody knows how a program ended: there a text on standard error counts as a failure.
std::string run_program(const std::vector<std::string>& arguments, const std::string& input,
                        std::chrono::milliseconds limit);

}  // namespace lockstep::io
