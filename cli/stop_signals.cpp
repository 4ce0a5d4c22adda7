#include "stop_signals.hpp"

#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <string_view>

namespace lockstep::cli {

namespace {

// It never waits: a stop must not depend on who reads.
void print_error(std::string_view text) {
  Output error(STDERR_FILENO);
  error.print(text);
  error.give_up();
}

}  // namespace

bool is_ignored(int signal) {
  struct sigaction action {};
  return sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

StopSignals::StopSignals(Output& output, bool quiet) : output_(output), quiet_(quiet) {
  sigemptyset(&awaited_);
  sigaddset(&awaited_, SIGTERM);
  for (const int signal : {SIGINT, SIGHUP}) {
    if (!is_ignored(signal)) sigaddset(&awaited_, signal);
  }
  pthread_sigmask(SIG_BLOCK, &awaited_, &mask_before_);
  waiter_ = std::thread([this] { wait_for_signals(); });
}

StopSignals::~StopSignals() {
  if (source_.stop_requested() && !output_.finish(kPatienceAfterStop)) output_.give_up();
  done_ = true;
  // Wakes the waiter. SIGTERM is blocked everywhere, so it ends nothing.
  // NOLINTNEXTLINE(bugprone-bad-signal-to-kill-thread)
  pthread_kill(waiter_.native_handle(), SIGTERM);
  waiter_.join();
  pthread_sigmask(SIG_SETMASK, &mask_before_, nullptr);
}

void StopSignals::wait_for_signals() {
  using Clock = std::chrono::steady_clock;
  Clock::time_point first;
  for (int signal = 0; !done_;) {
    if (sigwait(&awaited_, &signal) != 0 || done_) continue;
    // One request may come twice: timeout(1) signals its command and then the command's process group.
    if (signal == received_ && Clock::now() - first < std::chrono::milliseconds(500)) continue;
    if (received_ != 0) {
      print_error("\n");
      _exit(128 + signal);  // no destructors: threads may hang, and what is on the disk is whole at any moment
    }
    received_ = signal;
    first = Clock::now();
    if (!quiet_) {
      print_error(signal == SIGINT   ? "\nstopping (Ctrl-C again ends at once)\n"
                  : signal == SIGHUP ? "\nSIGHUP: stopping (a second signal ends at once)\n"
                                     : "\nSIGTERM: stopping (a second signal ends at once)\n");
    }
    source_.request_stop();
  }
}

}  // namespace lockstep::cli
