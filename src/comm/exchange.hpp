// Exchange: where the ranks of one process meet.
//
// A rank posts a call; when every member of the operation has posted, its work is cut into shares, one per rank, and
// whoever waits does shares until none is left. So nothing needs a thread of its own, ranks that wait together work
// together, and a result does not depend on who did what: share i always covers the same elements and adds them in the
// order of the ranks.
//
// Thread-safe. The first failure (calls that differ, a rank that left, a timeout, ranks that wait for each other, an
// exception in a share) is final: it ends every present and later wait of every rank.
#pragma once

#include <lockstep/devices.hpp>

#include "comm/streams.hpp"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace lockstep::comm {

class Operation;

// What one rank asks for.
struct Call {
  std::string text;                  // "allreduce(sum) of float [2, 3]": equal on all ranks of a collective
  std::vector<at::Tensor> in = {};   // read
  std::vector<at::Tensor> out = {};  // written
  std::vector<std::pair<at::Tensor, at::Tensor>> back =
      {};  // afterwards first.copy_(second): for tensors that are not contiguous
  std::function<void(const Operation&, int share)> work = {};  // share = 0 … shares() - 1; the first poster's is used
  std::function<std::string(const Operation&)> check = {};  // once all have posted: what does not fit together, or ""
};

class Operation {
 public:
  const std::vector<int>& members() const { return members_; }  // the ranks that take part, ascending
  const Call& call(int rank) const { return calls_.at(rank); }
  int shares() const { return static_cast<int>(members_.size()); }

 private:
  friend class Exchange;
  std::string title_;  // "collective 3", "message 0 -> 1, tag 0"
  std::vector<int> members_;
  std::map<int, Call> calls_;       // by rank; complete once posted() is true
  std::map<int, ReadyMark> ready_;  // by rank: what the rank's stream did before its call
  bool posted() const { return calls_.size() == members_.size(); }
  int next_share_ = 0;
  int finished_shares_ = 0;
  bool complete_ = false;
  DoneMark done_;  // what streams wait for that read the results
};

class Exchange {
 public:
  Exchange(Devices devices, std::chrono::milliseconds timeout);

  // Rank `rank` makes its next collective call. Throws Error if another rank's call at this place differs.
  std::shared_ptr<Operation> post(int rank, Call call);

  // Messages from one rank to another, matched in order per (source, destination, tag).
  std::shared_ptr<Operation> post_send(int rank, int destination, int tag, Call call);
  std::shared_ptr<Operation> post_recv(int rank, int source, int tag, Call call);

  // Does what shares are left to do, without waiting for others; true once the operation is complete.
  bool test(Operation& operation, int rank);

  // Waits until the operation is complete, working on it meanwhile; timeout 0 means the world's own. Throws Error, see
  // above.
  void wait(Operation& operation, int rank, std::chrono::milliseconds timeout);

  void abort(int rank, const std::string& reason);
  void leave(int rank);

  const Devices& devices() const { return devices_; }

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Side = std::tuple<int, int, int>;  // source, destination, tag

  std::shared_ptr<Operation> post_message(Side side, int rank, Call call);
  void join(Operation& operation, int rank,
            Call call);                         // adds one rank's call; the operation may now be ready to work on
  void work(Operation& operation, Lock& lock);  // shares until none is left to take
  void finish(Operation& operation);            // after the last share
  [[noreturn]] void fail(int rank, const std::string& reason);  // ends the world and throws
  void throw_if_failed(int rank, const Operation* operation) const;
  std::string missing(const Operation& operation) const;  // "rank 1 (cpu), which waits in …"
  bool stalled() const;  // every rank waits for a call that only another waiting rank could make

  const Devices devices_;
  const std::chrono::milliseconds timeout_;
  Streams streams_;

  std::mutex mutex_;  // guards all below and every Operation's fields, but for the tensors while shares are worked on
  std::condition_variable changed_;
  std::string failure_;  // of the world; empty while all is well
  std::vector<bool> left_;
  std::vector<uint64_t> next_collective_;                            // by rank
  std::map<uint64_t, std::shared_ptr<Operation>> collectives_;       // those that some rank has yet to join
  std::map<Side, std::deque<std::shared_ptr<Operation>>> messages_;  // those with one side missing
  std::vector<std::vector<const Operation*>> waiting_;               // by rank: what its threads wait for
};

}  // namespace lockstep::comm
