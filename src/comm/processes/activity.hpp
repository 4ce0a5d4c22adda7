// Activity tells whether this process does anything, apart from waiting for others. It counts once the user has asked
// for a stop: the run then waits for a rank that computes or writes a checkpoint.
#pragma once

#include <chrono>
#include <cstdint>

namespace lockstep::comm {

class Activity {
 public:
  // Call this a few times a second, always from the same thread, whose own work does not count. `moves` counts the
  // ranks' moves, and the result grows with `moves`. While a rank is `on_its_own` (it waits for no other), the result
  // also grows if threads have computed meanwhile, or one waits for a disk.
  int64_t count(int64_t moves, bool on_its_own);

 private:
  using Clock = std::chrono::steady_clock;
  using Time = std::chrono::nanoseconds;

  int64_t count_ = 0;
  int64_t moves_ = 0;
  Clock::time_point looked_ = {};
  Time computed_{};
};

}  // namespace lockstep::comm
