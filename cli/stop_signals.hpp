// Says that a signal asks the program to stop (stop_on_signals.hpp), and ends the program at a second signal.
#pragma once

#include <lockstep/base/stop_on_signals.hpp>

#include "output.hpp"

#include <stop_token>
#include <utility>

namespace lockstep::cli {

// Says on stderr that the program stops, unless another process of the job says so. At the second signal the program
// ends, with the exit code of a program that the signal has ended.
StopOnSignals::Told says_that_it_stops(bool quiet = false);

// Waits at its end, if a stop was asked for, at most a second for the reader of the output, and drops the rest.
class OutputAfterStop {
 public:
  OutputAfterStop(Output& output, std::stop_token stop) : output_(output), stop_(std::move(stop)) {}
  ~OutputAfterStop() {
    if (stop_.stop_requested() && !output_.finish(kPatienceAfterStop)) output_.give_up();
  }
  OutputAfterStop(const OutputAfterStop&) = delete;
  OutputAfterStop& operator=(const OutputAfterStop&) = delete;

 private:
  Output& output_;
  const std::stop_token stop_;
};

}  // namespace lockstep::cli
