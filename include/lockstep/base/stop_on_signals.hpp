// StopOnSignals: takes Ctrl-C, SIGTERM and SIGHUP as a polite request, so that a run ends after a step and keeps a
// checkpoint.
//
//   lockstep::StopOnSignals signals;
//   lockstep::fit(task, options, {.stop = signals.token()});  // as does RunOptions::stop
//
// The first signal asks for a stop, the second ends the program at once. The same signal again within half a second
// counts as the first: timeout(1) signals its command and then the command's process group. Costs a sleeping thread.
#pragma once

#include <atomic>
#include <csignal>
#include <functional>
#include <stop_token>
#include <thread>
#include <vector>

namespace lockstep {

// While a StopOnSignals lives, the three signals go to its own thread. They interrupt neither the thread that made the
// StopOnSignals nor threads started from there. Its end restores everything. Make one at a time. A signal that the
// parent process ignored (nohup; a job in the background of a script) stays ignored, but for SIGTERM.
class StopOnSignals {
 public:
  // This is called for each signal that counts, on the thread that waits for signals. `number` is 1 for the first
  // signal, and 2 for the second, which ends the program when this call returns.
  using Told = std::function<void(int signal, int number)>;

  // Throws Error if there is another StopOnSignals in this process.
  explicit StopOnSignals(Told told = {});
  ~StopOnSignals();
  StopOnSignals& operator=(StopOnSignals&&) = delete;

  std::stop_token token() const { return source_.get_token(); }
  void request_stop() { source_.request_stop(); }  // asks for a stop for a reason of your own
  int received() const { return received_; }       // the first signal that came; 0 if none did

 private:
  struct Before {
    int signal;
    struct sigaction action;
  };
  void wait_for_signals();

  const Told told_;
  std::stop_source source_;
  std::atomic<int> received_ = 0;
  std::atomic<bool> done_ = false;
  sigset_t awaited_, mask_before_;
  std::vector<Before> before_;  // the signals' actions before
  std::thread waiter_;
};

}  // namespace lockstep
