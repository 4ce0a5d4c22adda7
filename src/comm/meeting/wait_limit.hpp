// WaitLimit: how long a process waits for the others before a run, unless the user no longer wants it.
#pragma once

#include <lockstep/base/error.hpp>

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

}  // namespace lockstep::comm
