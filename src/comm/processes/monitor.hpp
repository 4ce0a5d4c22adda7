// Monitor: lets the processes of a run know of each other while they work, so that nothing waits for ever.
//
// The first failure of the whole job is final. It is the same everywhere, and ends every present and later wait of
// every rank. Four parts do the work:
//
//   Board     has what the processes tell each other, in the store
//   Waits     has what this process's ranks wait in, and the failure that ends it
//   Watchdog  is the thread that says that this process lives, and looks whether the others live
//   blame     finds whom a rank waits for in vain: functions of values
//
// Order and lifetimes; waits.hpp has the locks' rules.
//  1. A failure goes to the board first. The failure that the board gives back ends this process's waits.
//  2. A rank's call begins as a Waiting. Then the rank looks at failure(), and only then it waits.
//  3. Board and Waits outlive the Watchdog, whose thread stop() joins. After stop() nothing here calls on_failure.
//  4. Every Waiting ends before the Monitor does.
// All calls are thread-safe.
#pragma once

#include "board.hpp"
#include "calls.hpp"
#include "comm/meeting/rendezvous.hpp"
#include "comm/meeting/roster.hpp"
#include "rank_state.hpp"
#include "waits.hpp"
#include "watchdog.hpp"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

namespace lockstep::comm {

// More than twelve functions: a Monitor stands before the board, the waits and the watchdog for its world.
class Monitor {
 public:
  using Clock = Waits::Clock;

  struct Options {
    std::chrono::milliseconds timeout;  // the timeout of the run's calls
    SilenceRange silence;               // the time without a heartbeat after which a process counts as dead
    std::string host;                   // the store's keeper in words, for the error when the store is gone
    std::stop_token stop = {};
  };

  // `store` is the monitor's own connection.
  Monitor(StorePtr store, Roster roster, int process, const Options& options);

  // The watchdog's thread calls `on_failure` once and `look` again and again. `look` gives a failure, or an empty one.
  void start(std::function<void()> on_failure, std::function<Failure()> look);
  void stop() { watchdog_.stop(); }

  // Says that a rank of this process failed. If another rank was first, its text stays.
  void report(const Failure& failure);
  Failure failure() const { return waits_.failure(); }  // gives an empty one while all is well
  bool failed() const { return waits_.failed(); }
  [[noreturn]] void raise(int rank);  // throws the failure, between two calls of this rank

  CallLog& log() { return log_; }  // gives the calls of this process's ranks
  void returned(int rank) { waits_.note_return(rank); }
  void stepped(int64_t steps) { steps_ = steps; }  // notes how many steps of training are done, as a rank counts them

  // While the object lives, a rank waits in a call. After `timeout`, in which time of standing still does not count,
  // the run fails; from a rank that polls, ask is_late(). `interrupt` makes the rank look whether its wait is in vain.
  // Any thread calls `interrupt`, when the run has failed.
  class Waiting {
   public:
    Waiting(Monitor& monitor, OpenCall call, std::chrono::milliseconds timeout, std::function<void()> interrupt = {});
    ~Waiting();
    Waiting& operator=(Waiting&&) = delete;
    bool is_late() const { return waits_.is_late(id_); }
    std::chrono::milliseconds timeout() const { return timeout_; }

   private:
    Waits& waits_;
    const std::chrono::milliseconds timeout_;
    const uint64_t id_;
  };

  // Reports that a rank's own call failed with `cause`, and that no other rank is to blame.
  void report_own(const OpenCall& call, const std::exception_ptr& cause);

  // Call this when a wait ended with `cause` or is late, or when the run has failed. Finds out who is to blame, reports
  // the failure and throws it.
  [[noreturn]] void explain(const Waiting& waiting, const OpenCall& call, const std::exception_ptr& cause);

  // Call this when this process's ranks are done. Waits until all processes' ranks are done, or until there is a
  // failure, and gives it. If a process died, the text also says where a rank of another process was. A call that came
  // about on some ranks only is a failure. Once all calls are known to fit together, `complete` does what is left of
  // this process's calls.
  Failure finish(const std::function<void()>& complete);
  Failure finish_taking_down();  // finishes once more, after communicators are taken down

  bool is_over() const { return is_over_; }  // finish() has found no failure, so no more calls can be made

  bool store_is_lost() const { return board_.store_is_lost(); }
  const Roster& roster() const { return roster_; }

 private:
  void look_for_failure();
  void report_lateness(const OpenCall& call, std::chrono::milliseconds timeout);
  void with_store(const std::function<void()>& work);  // reports a failure if the store is gone or has foreign values
  void note_where(const std::string& text);
  void agree_on_end();
  void wait_for_all(const std::string& place);
  void check_calls();
  Failure last_words();
  std::vector<std::optional<Calls>> calls_of_the_living(const Failure& first);

  const Roster roster_;
  const int process_;
  CallLog log_;
  Waits waits_;
  Board board_;
  std::atomic<int64_t> steps_ = 0;  // 0: nobody counts them
  std::atomic<bool> is_over_ = false;
  std::mutex mutex_;   // guards what follows
  std::string where_;  // where a rank of this process was when it learned of the failure
  Watchdog watchdog_;  // last, since its thread uses the others
};

}  // namespace lockstep::comm
