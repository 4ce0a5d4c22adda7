// A WaitLimit says how long a process waits for the others before a run, unless the user stops it. pause_after gives
// the pause between two looks into the store.
#pragma once

#include <lockstep/base/error.hpp>

#include <algorithm>
#include <chrono>
#include <stop_token>
#include <string>

namespace lockstep::comm {

struct WaitLimit {
  std::chrono::milliseconds timeout{};
  std::stop_token stop = {};

  // Throws Stopped if a stop was requested. `process` names the one that waits.
  void check(const std::string& process) const {
    if (stop.stop_requested()) throw Stopped(process + ": stopped by request");
  }
};

// Gives the pause before the next look into the store: an eighth of the time waited so far, within limits. So a value
// that comes soon is seen at once, and a long wait costs few questions.
inline std::chrono::microseconds pause_after(std::chrono::steady_clock::duration waited,
                                             std::chrono::microseconds longest) {
  constexpr std::chrono::microseconds shortest(250);
  return std::clamp(std::chrono::duration_cast<std::chrono::microseconds>(waited) / 8, shortest, longest);
}

}  // namespace lockstep::comm
