// Runs another program that takes text and gives bytes, and stops it when the time is over.
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
// returns its standard output. The program runs in another process group, so Ctrl-C on the terminal does not reach it.
// Throws Error, which names a program that is not there (ProgramNotFound), failed (with its standard error), was ended
// by a signal, or took longer than `limit` and was killed. Where this process ignores SIGCHLD, nobody knows how a
// program ended: there a text on standard error counts as a failure.
std::string run_program(const std::vector<std::string>& arguments, const std::string& input,
                        std::chrono::milliseconds limit);

}  // namespace lockstep::io
