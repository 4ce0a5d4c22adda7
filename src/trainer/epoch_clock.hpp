// EpochClock measures an epoch's training time, and how long of it a rank waits for data. Pauses do not count.
#pragma once

#include "base/seconds_since.hpp"

#include <chrono>
#include <optional>

namespace lockstep {

class EpochClock {
 public:
  // Begins an epoch, with the times that the epoch has taken already if the run goes on within it.
  void reset(double seconds = 0, double waited = 0) {
    seconds_ = seconds;
    waited_ = waited;
    started_.reset();
  }

  // Training begins, or goes on after a pause, and the rank asks for its next batch.
  void start() {
    asked_ = Clock::now();
    started_ = asked_;
  }
  void pause() {  // no time counts until start()
    seconds_ = seconds();
    started_.reset();
  }

  void batch_came() { waited_ += seconds_since(asked_); }
  void step_done() { asked_ = Clock::now(); }  // the rank asks for its next batch

  double seconds() const { return seconds_ + (started_ ? seconds_since(*started_) : 0); }
  double waited() const { return waited_; }

 private:
  using Clock = std::chrono::steady_clock;

  double seconds_ = 0;  // seconds before started_
  double waited_ = 0;
  std::optional<Clock::time_point> started_;  // absent: the clock pauses
  Clock::time_point asked_;
};

}  // namespace lockstep
