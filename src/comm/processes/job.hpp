// Job: this process's place in its launcher's job, and its store, for the process's whole life.
#pragma once

#include <lockstep/base/error.hpp>

#include "base/libtorch_log.hpp"
#include "comm/meeting/rendezvous.hpp"

#include <atomic>
#include <memory>
#include <mutex>

namespace lockstep::comm {

class Job {
 public:
  Job() { log_errors_only(); }

  // In a simulation, where one program is many processes, each has its own (tests/simulation).
  static Job& of_this_process();

  // The number of the run that begins. Throws Error if one is under way: the other processes could not tell which.
  int begin() {
    if (running_.exchange(true)) {
      throw Error(
          "run() was called while another run() of this process is under way on another thread. Processes of a "
          "launcher make their runs one at a time, all in the same order");
    }
    return ++runs_;
  }
  void end() { running_ = false; }

  // Throws Error at the deadline; the next call tries again.
  Rendezvous& rendezvous(const LaunchEnvironment& launch, const WaitLimit& limit) {
    const std::lock_guard lock(mutex_);
    if (!rendezvous_) rendezvous_ = std::make_unique<Rendezvous>(launch, limit);
    return *rendezvous_;
  }

 private:
  std::atomic<bool> running_ = false;
  int runs_ = 0;
  std::mutex mutex_;
  std::unique_ptr<Rendezvous> rendezvous_;
};

}  // namespace lockstep::comm
