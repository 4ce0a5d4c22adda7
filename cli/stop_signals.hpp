// Takes Ctrl-C, SIGTERM and SIGHUP as a polite request. The first asks for a stop, the second ends the program at once.
// The same signal again within half a second counts as the first.
#pragma once

#include <atomic>
#include <csignal>
#include <stop_token>
#include <thread>

#include "output.hpp"

namespace lockstep::cli {

// Whether this process ignores the signal. nohup starts such processes, and so does a script in the background. A
// signal that is blocked and awaited would come all the same.
bool is_ignored(int signal);

// While it lives, SIGINT, SIGTERM and SIGHUP are blocked in its thread and in all threads started from there. A thread
// of its own waits for them. So they interrupt no system call, and need no code that is safe in a handler. Make it
// before other threads start, one at a time. A signal that the parent process ignored (a job in the background of a
// script) stays ignored.
class StopSignals {
 public:
  // quiet: another process of the job announces the stop.
  explicit StopSignals(Output& output, bool quiet = false);
  // After a request to stop, waits for who reads the output for a second, and drops the rest.
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  std::stop_token token() const { return source_.get_token(); }
  void request_stop() { source_.request_stop(); }  // for reasons of our own
  int received() const { return received_; }       // the first signal that came; 0 if none did

 private:
  void wait_for_signals();

  Output& output_;
  const bool quiet_;
  std::stop_source source_;
  std::atomic<int> received_ = 0;
  std::atomic<bool> done_ = false;
  sigset_t awaited_;
  sigset_t mask_before_;
  std::thread waiter_;
};

}  // namespace lockstep::cli
