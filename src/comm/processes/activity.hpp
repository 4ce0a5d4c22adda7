// Activity: whether this process does anything, apart from waiting for others. For when the user has asked for a stop:
// a rank that computes, or writes a checkpoint, is waited for.
#pragma once

#include <chrono>
#include <cstdint>

namespace lockstep::comm {

class Activity {
 public:
  // From the same thread each time, whose own work does not count; a few times a second. The count grows with `moves`
  // (of the ranks, which only grows itself) and, while a rank is `on_its_own` (waits for no other), whenever threads of
  // this process have computed for a part of the time, or one waits for a disk.
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
