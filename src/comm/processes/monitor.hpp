// Monitor: what the processes of a run know of each other while they work, so that nothing waits for ever.
//
// The first failure of the whole job is final. It is the same everywhere, and it ends every present and later
// wait of every rank. Four parts do the work:
//
//   Board     what the processes tell each other, in the store
//   Waits     what this process's ranks wait in, and the failure that ends it
//   Watchdog  the thread that says that this process lives, and looks whether the others do
//   blame     whom a rank waits for in vain: functions of values
//
// Order and lifetimes; waits.hpp has the locks' rules.
//  1. A failure goes to the board first. What the board gives back ends this process's waits.
//  2. A rank's call begins as a Waiting. Then it looks at failure(), and only then it waits.
//  3. Board and Waits outlive the Watchdog, whose thread stop() joins. After stop() nothing here calls on_failure.
//  4. Every Waiting ends before the Monitor does.
// Thread-safe.
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
#include <stop_token>
#include <string>
#include <utility>

namespace lockstep::comm {

class Monitor {
 public:
  using Clock = Waits::Clock;

  struct Options {
    std::chrono::milliseconds timeout;  // of the run's calls
    SilenceRange silence;               // without a heartbeat, until a process counts as dead
    std::string host;                   // who keeps the store, in words, for when it is gone
    std::stop_token stop = {};
  };

  // `store` is the monitor's own connection.
  Monitor(StorePtr store, Roster roster, int process, const Options& options);

  // Both are called from the watchdog's thread: `on_failure` once, `look` again and again. What it gives is a failure.
  void start(std::function<void()> on_failure, std::function<Failure()> look);
  void stop() { watchdog_.stop(); }

  // Says that a rank of this process failed. If another rank was first, its text stays.
  void report(const Failure& failure);
  Failure failure() const { return waits_.failure(); }  // empty while all is well
  bool failed() const { return waits_.failed(); }
  [[noreturn]] void raise(int rank);  // the failure, between two calls of this rank

  CallLog& log() { return log_; }  // of this process's ranks
  void returned(int rank) { waits_.note_return(rank); }
  void stepped(int64_t steps) { steps_ = steps; }  // so many steps of training are done, as a rank counts them

  // A rank waits in a call while the object lives. After `timeout`, in which this process did not stand still, the run
  // fails; but a rank that polls has to ask is_late(). `interrupt` makes its wait look whether it is in vain. Any
  // thread calls it, when the run has failed.
  class Waiting {
   public:
    Waiting(Monitor& monitor, OpenCall call, std::chrono::milliseconds timeout, std::function<void()> interrupt = {});
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
    bool is_late() const { return waits_.is_late(id_); }
    std::chrono::milliseconds timeout() const { return timeout_; }

   private:
    Waits& waits_;
    const std::chrono::milliseconds timeout_;
    const uint64_t id_;
  };

  // A rank's own call failed with `cause`, for which nobody else is to blame.
  void report_own(const OpenCall& call, const std::exception_ptr& cause);

  // A wait ended with `cause`, or because it is late or the run has failed. Finds out who is to blame, reports it and
  // throws it.
  [[noreturn]] void explain(const Waiting& waiting, const OpenCall& call, const std::exception_ptr& cause);

  // This process's ranks are done. Waits until all processes' are, or until there is a failure, and gives it. If
  // that is a process's death, the text also says where one of the others' ranks was. A call that came about on some
  // ranks only is a failure. Once all calls are known to fit together, `complete` does what is left of this process's.
  Failure finish(const std::function<void()>& complete);
  Failure finish_taking_down();  // the same once more, after what finish() allows to be taken down

  bool is_over() const { return is_over_; }  // finish() has found no failure: no more calls

  bool store_is_lost() const { return board_.store_is_lost(); }
  const Roster& roster() const { return roster_; }

 private:
  void look_for_failure();
  void report_lateness(const OpenCall& call, std::chrono::milliseconds timeout);
  void note_where(const std::string& text);
  void agree_on_end();
  void wait_for_all(const std::string& place);
  void check_calls();
  Failure last_words();

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
