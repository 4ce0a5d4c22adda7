// An Exchange is where the ranks of one process meet.
//
// A rank posts a call. When every member of the operation has posted, its work is cut into shares, and ranks that wait
// do shares until none is left. So nothing needs a thread of its own, and ranks that wait together work together. A
// rank that waits spins for some microseconds, as long as every rank can have a core, and then sleeps. All calls are
// thread-safe.
//
//  1. A rank makes the calls of a group in one order, and its n-th call meets the others' n-th.
//  2. Share i always covers the same elements and adds them in the order of the ranks. So a result does not depend on
//     who did what.
//  3. One mutex guards all that is agreed. Shares run outside of it.
//  4. The tensors of a call live until all members have posted it and the last share is done.
//  5. A rank's calls are done in the order in which they were made, as far as all members have posted. Calls without a
//     wait are done too, in the rank's next wait or when it leaves.
//  6. The first failure is final: it ends every present and later wait of every rank. A failure is calls that differ, a
//     rank that left, a timeout, ranks that wait for each other, or an exception in a share.
#pragma once

#include <c10/util/SmallVector.h>
#include <lockstep/devices/devices.hpp>

#include "comm/failure.hpp"
#include "operation.hpp"
#include "streams.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace lockstep::comm {

class Exchange {
 public:
  Exchange(Devices devices, std::chrono::milliseconds timeout);

  // A Group has ranks that make collective calls together, and the calls that some of its ranks have yet to join.
  class Group {
   public:
    explicit Group(Members of) : members(std::move(of)), next_collective_(members.size()) {}
    const Members members;

   private:
    friend class Exchange;
    std::vector<uint64_t> next_collective_;  // numbers by rank; guarded by the Exchange, as all below
    std::map<uint64_t, std::shared_ptr<Operation>> collectives_;
    std::map<Side, std::deque<std::shared_ptr<Operation>>> messages_;  // messages with one side missing
  };
  // Gives the group of this name, and makes it at the first call. It lives as long as the exchange.
  Group& group(const Members& members);

  // All that follows up to wait() takes the rank's number in the group.

  // Rank `rank` makes its next collective call. Throws Error if another rank's call at this place differs.
  std::shared_ptr<Operation> post(Group& group, int rank, Call call);

  // Rank `rank`, the source or destination of a message, makes its call. Messages of one side are matched in order.
  std::shared_ptr<Operation> post_message(Group& group, const Side& side, int rank, Call call);
  // Receives the message of this tag that any rank sent first, or else the next one that any rank will send.
  std::shared_ptr<Operation> post_recv_any(Group& group, int rank, int tag, Call call);

  // Does the shares that are left to do, without waiting for others. Gives true once the operation is complete. Throws
  // Error as wait() does; `timeout` counts from the rank's call.
  bool test(Operation& operation, int rank, std::chrono::milliseconds timeout);

  // Waits until the operation is complete, working on it meanwhile; timeout 0 means the world's own. Throws Error, see
  // 6.
  void wait(Operation& operation, int rank, std::chrono::milliseconds timeout);

  // All that follows takes the rank's number in the world.

  void abort(int rank, const Failure& reason);

  // Does what is left of the rank's calls. Throws Error if that fails, or if `rank` is the last to leave and some rank
  // made a call that others did not.
  void leave(int rank);

  const Devices& devices() const { return devices_; }
  std::string name(int rank) const;  // gives "rank 1 (cpu)"

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Operations = c10::SmallVector<std::shared_ptr<Operation>, 2>;

  // Open has the calls of one rank, in order, that it has neither waited for nor, on a CPU, seen complete.
  struct Open {
    std::mutex mutex;  // may be taken while mutex_ is held, not the other way round
    std::vector<std::shared_ptr<Operation>> calls;
  };

  void join(const std::shared_ptr<Operation>& joined, int rank, Call call);  // the last call makes work

  // Call these without the lock:
  Operations before(const Operation* operation, int rank);     // the open calls before it; null: all; rank in the world
  void forget_complete(int rank, const Operation* last);       // forgets up to this call; null: all; rank in the world
  static bool is_held_up(const Operations& earlier);           // others still do the last shares of a call
  static bool all_done(const Operations& earlier);             // looks at calls that all members have posted
  void work(Operation& operation, const Operations& earlier);  // earlier calls first; stops where others are not done
  void work(Operation& operation);                             // takes shares until none is left
  void complete(const Operations& earlier, int rank, std::chrono::milliseconds timeout);  // rank in the world
  void run_share(Operation& operation, int share);
  void finish(Operation& operation);  // call it after the last share
  void end(const Failure& failure);   // ends the world, unless it has ended already
  // Spins until the operation is complete, the world has ended, or kSpin is over.
  void spin(Operation& operation, const Operations& earlier);
  // Sleeps until the operation is complete. Throws Error, see 6.
  void sleep(Operation& operation, const Operations& earlier, int rank, std::chrono::milliseconds timeout);

  // Call these with the lock:
  void set_failure(const Failure& failure);
  [[noreturn]] void fail(int rank, const Failure& reason);  // ends the world and throws; rank in the world
  void throw_if_ended(int rank) const;                      // rank in the world
  void throw_if_failed(int rank, const Operation& operation) const;
  void throw_if_left(int rank, const Operation& operation);
  void throw_if_all_left(int rank, const Operation& operation);  // call it for a receive from any rank
  void throw_if_unanswered(int rank);
  [[noreturn]] void fail_late(int rank, const Operation& operation, std::chrono::milliseconds timeout);
  std::vector<int> awaited(const Operation& operation) const;  // gives who has not posted, by rank in the world
  std::string missing(const Operation& operation) const;       // gives "rank 1 (cpu), which waits in …"
  bool stalled() const;  // every rank waits for a call that only another waiting rank could make

  const Devices devices_;
  const std::chrono::milliseconds timeout_;
  const bool can_spin_;
  Streams streams_;
  std::atomic<bool> failed_ = false;
  std::atomic<bool> someone_left_ = false;
  std::vector<Open> open_;  // open calls by rank in the world

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  Failure failure_;                                     // why the world ended; empty while all is well
  std::vector<bool> left_;                              // ranks that have left
  std::map<std::string, Group> groups_;                 // groups by name
  std::vector<std::vector<const Operation*>> waiting_;  // operations that each rank's threads wait for
};

}  // namespace lockstep::comm
