// Reads clocks, to measure how long something took.
#pragma once

#include <chrono>
#include <ctime>

namespace lockstep {

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Gives the seconds that the calling thread has computed. Unlike a clock on the wall, this clock stands still while
// other programs have the core. So a busy machine does not spoil the times measured of one thread.
inline double thread_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace lockstep
