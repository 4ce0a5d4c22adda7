// Waits has the calls that this process's ranks wait in, and the failure that ends their waits. It is thread-safe.
//
//  1. One mutex guards everything here. Nobody talks to the store while holding it.
//  2. Under the mutex two things are called: the waits' interrupts, and the conditions of sleep(). These take locks of
//     their own (of a work), and never call Waits.
//  3. A wait begins before the rank looks whether it is in vain. A failure is known before the waits are interrupted.
//     So each wait either sees the failure or is interrupted.
//  4. end() takes the mutex. So no interrupt runs once its wait has ended.
//  5. The first failure stays.
#pragma once

#include "comm/failure.hpp"
#include "rank_state.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <vector>

namespace lockstep::comm {

class Waits {
 public:
  using Clock = std::chrono::steady_clock;

  struct Wait {
    OpenCall call;
    std::chrono::milliseconds timeout;
    Clock::duration waited = {};             // see pass()
    Clock::time_point since = Clock::now();  // the time of the last pass(), or of the wait's begin

    bool is_late() const { return waited >= timeout; }
  };

  struct Snapshot {
    std::vector<Wait> open;  // open waits in the order in which they began
    std::set<int> returned;  // ranks that have returned
    int64_t moves = 0;       // the number of waits that have begun or ended
    bool searching = false;  // a rank searches for whoever closed its connection
    bool finishing = false;  // all ranks of this process have ended
  };

  // `interrupt` makes the rank look whether its wait is in vain. Any thread may call `interrupt`. Gives the number that
  // end() takes.
  uint64_t begin(Wait wait, std::function<void()> interrupt);
  void end(uint64_t id);
  bool is_late(uint64_t id) const;
  void pass(Clock::duration most);  // adds the time since the last pass() to the open waits, but at most so much
  void note_return(int rank);
  void note_finish();
  Snapshot snapshot() const;

  void fail(const Failure& failure);  // ends all waits
  Failure failure() const;            // gives an empty one while all is well
  bool failed() const { return failed_; }
  void wake();  // makes sleep() look at its condition

  // Sleeps until `enough(failed)`, but at most for `limit`.
  using Condition = std::function<bool(bool failed)>;
  void sleep(Clock::duration limit, const Condition& enough);

  // While this object lives, snapshots show that a rank searches. The watchdog's silence begins anew with each snapshot
  // without a search. So keep one object from a search's beginning to its end, whatever the rank does meanwhile.
  class Search {
   public:
    explicit Search(Waits& waits) : waits_(waits) { waits_.add_searching(1); }
    ~Search() { waits_.add_searching(-1); }
    Search& operator=(Search&&) = delete;

   private:
    Waits& waits_;
  };

 private:
  struct Open {
    Wait wait;
    std::function<void()> interrupt;
  };

  void add_searching(int count);

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::map<uint64_t, Open> open_;
  uint64_t next_id_ = 0;
  std::set<int> returned_;
  int64_t moves_ = 0;
  int searching_ = 0;  // the number of ranks that search
  bool finishing_ = false;
  Failure failure_;
  std::atomic<bool> failed_ = false;  // says that there is a failure, for ranks that ask before each call
};

}  // namespace lockstep::comm
