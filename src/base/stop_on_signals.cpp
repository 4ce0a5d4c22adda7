#include <pthread.h>
#include <unistd.h>
#include <lockstep/base/error.hpp>
#include <lockstep/base/stop_on_signals.hpp>

#include "signals.hpp"
#include "start_thread.hpp"

#include <chrono>
#include <utility>

namespace lockstep {
namespace {

// Tells the handler, which has no captures, which thread waits. 0: there is no StopOnSignals; -1: one begins.
std::atomic<pid_t> waiting_thread = 0;

}  // namespace

StopOnSignals::StopOnSignals(Told told) : told_(std::move(told)) {
  pid_t none = 0;
  if (!waiting_thread.compare_exchange_strong(none, -1)) {
    throw Error("there is a StopOnSignals in this process already, which gets the signals; use its token");
  }
  sigemptyset(&awaited_);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) {
    if (signal != SIGTERM && is_ignored(signal)) continue;
    sigaddset(&awaited_, signal);
    before_.push_back({signal, {}});
  }
  // The order counts: the thread inherits the mask, and the handlers send to the thread.
  pthread_sigmask(SIG_BLOCK, &awaited_, &mask_before_);
  try {
    waiter_ = start_thread([this] { wait_for_signals(); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &mask_before_, nullptr);
    waiting_thread = 0;
    throw;
  }
  waiting_thread.wait(-1);
  for (auto& [signal, before] : before_) {
    struct sigaction sending {};
    // Passes the signal on. Earlier threads do not block the signal, so one of these may get it.
    sending.sa_handler = [](int coming) {
      const pid_t thread = waiting_thread;
      if (thread > 0) tgkill(getpid(), thread, coming);
    };
    sending.sa_flags = SA_RESTART;
    sigaction(signal, &sending, &before);
  }
}

StopOnSignals::~StopOnSignals() {
  for (const auto& [signal, before] : before_) sigaction(signal, &before, nullptr);
  done_ = true;
  // Wakes the waiter. SIGTERM is blocked there, so it ends nothing.
  // NOLINTNEXTLINE(bugprone-bad-signal-to-kill-thread)
  pthread_kill(waiter_.native_handle(), SIGTERM);
  waiter_.join();
  waiting_thread = 0;
  // A signal that came before, and that the waiter has not taken, asks for a stop too. It must not end a program that
  // is about to say why a run has failed.
  const timespec no_time{};
  while (sigtimedwait(&awaited_, nullptr, &no_time) > 0) source_.request_stop();
  pthread_sigmask(SIG_SETMASK, &mask_before_, nullptr);
}

void StopOnSignals::wait_for_signals() {
  using Clock = std::chrono::steady_clock;
  waiting_thread = gettid();
  waiting_thread.notify_all();
  Clock::time_point first;
  for (int signal = 0; !done_;) {
    if (sigwait(&awaited_, &signal) != 0 || done_) continue;
    if (signal == received_ && Clock::now() - first < std::chrono::milliseconds(500)) continue;
    if (received_ != 0) {
      if (told_) told_(signal, 2);
      // Ends the process as if nobody had taken the signal: threads may hang, and files are whole at any moment.
      for (const auto& [taken, before] : before_) {
        if (taken == signal) sigaction(signal, &before, nullptr);
      }
      pthread_sigmask(SIG_UNBLOCK, &awaited_, nullptr);
      raise(signal);
      continue;  // the program had a handler of its own
    }
    received_ = signal;
    first = Clock::now();
    if (told_) told_(signal, 1);
    source_.request_stop();
  }
}

}  // namespace lockstep
