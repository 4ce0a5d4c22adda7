// Hierarchy: the ranks of one process make one call together to the other processes.
//
// Once all ranks of the process have posted a call, a thread of the process, the courier, reduces their values. It
// reduces the result with the other processes, over a Gloo group with one member per process, and gives it to the
// ranks. So the exchange goes on while the ranks compute. Thread-safe.
//
//  1. The courier takes the calls in the order of their posts, which is the same in all processes.
//  2. Within a process it adds in the order of the ranks.
//  3. The courier alone calls the group of the leaders.
//  4. After close() no call completes: open calls and later ones end with an error.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "comm/group_member.hpp"
#include "comm/meeting/roster.hpp"
#include "gloo_reduction.hpp"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace lockstep::comm {

class Hierarchy {
 public:
  enum class Kind { allreduce, reduce, broadcast, barrier };

  struct RankCall {
    Kind kind = Kind::barrier;
    c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM;
    int root = 0;
    std::string text;      // equal on all ranks
    at::Tensor flat = {};  // one dimension, contiguous
    uint32_t tag = 0;      // the tag of the call between the processes; equal on all ranks
  };

  // `leaders` is this process's member of a group of all processes.
  Hierarchy(GroupMember leaders, const Roster& roster, int process, int threads);
  ~Hierarchy();
  Hierarchy(const Hierarchy&) = delete;
  Hierarchy& operator=(const Hierarchy&) = delete;

  // Posts a rank's call. Throws Error if another rank of this process made another call at this place.
  c10::intrusive_ptr<c10d::Work> post(int rank, RankCall call);

  void close();  // ends every present and later call

 private:
  class Promise;
  struct JointCall {
    std::vector<RankCall> calls;  // calls by the rank's place in this process
    std::vector<c10::intrusive_ptr<Promise>> promises;
    size_t posted = 0;
  };

  void run(int threads);
  void work(JointCall& joint);
  void fail_all(const std::exception_ptr& cause);
  void complete(const Pending& pending);
  void allreduce(const std::vector<RankCall>& calls);
  void reduce(const std::vector<RankCall>& calls);
  void broadcast(const std::vector<RankCall>& calls);

  const GroupMember leaders_;
  const Roster roster_;
  const int process_;
  const Range ranks_;
  const int world_size_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<std::shared_ptr<JointCall>> queue_;  // the first of these is call number first_
  int64_t first_ = 0;
  std::vector<int64_t> next_;  // next calls by the rank's place in this process
  bool closed_ = false;

  std::thread courier_;
};

}  // namespace lockstep::comm
