// A Job has this process's place in its launcher's job, and the job's store, for the process's whole life. In an
// elastic job the place changes with each generation (ranks/succession.hpp).
#pragma once

#include <lockstep/base/error.hpp>

#include "base/libtorch_log.hpp"
#include "comm/meeting/rendezvous.hpp"

#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace lockstep::comm {

class Job {
 public:
  Job() { log_errors_only(); }
  ~Job() { wait_for_work_beside(); }
  Job& operator=(Job&&) = delete;

  // Gives the job of this process. In a simulation one program is many processes, and each has its own job
  // (tools/simulated_jobs).
  static Job& of_this_process();

  // Gives the number of the run that begins. Throws Error if another run is under way: the other processes could not
  // tell which of the two a call belongs to.
  int begin() {
    if (running_.exchange(true)) {
      throw Error(
          "run() was called while another run() of this process is under way on another thread. Processes of a "
          "launcher make their runs one at a time, all in the same order");
    }
    return ++runs_;
  }
  void end() { running_ = false; }

  // Gives this process's place, as the launcher says, or in the generation that it has entered. A process of an elastic
  // job that has not entered a generation yet is rank 0 only if it is member 0.
  std::optional<LaunchEnvironment> launch() const {
    auto launch = read_launch_environment(std::getenv);
    if (!launch || launch->member < 0) return launch;
    const std::lock_guard lock(mutex_);
    launch->rank = seat_ ? seat_->index : launch->member;
    if (seat_) launch->world_size = seat_->count;
    return launch;
  }

  // A Seat is a place in a generation, and the prefix of the keys of its run.
  struct Seat {
    std::string keys;
    int index = 0;
    int count = 1;
  };
  void enter(Seat seat) {
    const std::lock_guard lock(mutex_);
    seat_ = std::move(seat);
  }
  std::optional<Seat> seat() const {
    const std::lock_guard lock(mutex_);
    return seat_;
  }

  // Throws Error at the deadline; the next call tries again.
  Rendezvous& rendezvous(const LaunchEnvironment& launch, const WaitLimit& limit) {
    const std::lock_guard lock(mutex_);
    if (!rendezvous_) rendezvous_ = std::make_unique<Rendezvous>(launch, limit);
    return *rendezvous_;
  }

  // Does `work` on a thread of its own, once the work before is done.
  void do_beside(std::function<void()> work) {
    const std::lock_guard lock(beside_mutex_);
    if (beside_.joinable()) beside_.join();
    const auto shared = std::make_shared<std::function<void()>>(std::move(work));
    try {
      beside_ = std::thread([shared] { (*shared)(); });
    } catch (const std::system_error&) {  // there are no more threads to be had
      (*shared)();
    }
  }
  void wait_for_work_beside() {
    const std::lock_guard lock(beside_mutex_);
    if (beside_.joinable()) beside_.join();
  }

 private:
  std::atomic<bool> running_ = false;
  int runs_ = 0;
  mutable std::mutex mutex_;  // guards what follows
  std::unique_ptr<Rendezvous> rendezvous_;
  std::optional<Seat> seat_;  // the seat in an elastic job
  std::mutex beside_mutex_;   // guards what follows
  std::thread beside_;
};

}  // namespace lockstep::comm
