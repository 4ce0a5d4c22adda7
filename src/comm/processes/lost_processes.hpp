// LostProcesses: which processes of a run are gone while the others go on without them.
//
//  1. At first a process is needed: if it is gone, the run has failed.
//  2. It is dispensable while the others can do without all of its ranks.
//  3. If it is gone while it is dispensable, it is lost, and stays so.
//  4. Each of these changes is one comparison in the store. So all processes agree on who was lost, and a process that
//     only stood still learns it when it comes back.
//
// The keys in the store: comm/meeting/process_status.hpp. Thread-safe.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "comm/meeting/process_status.hpp"
#include "comm/meeting/rendezvous.hpp"
#include "comm/meeting/roster.hpp"
#include "rank_state.hpp"

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace lockstep::comm {

class LostProcesses {
 public:
  // Without `allowed` every process stays needed, and the store is not asked.
  LostProcesses(StorePtr store, Roster roster, int process, bool allowed);

  void begin();  // this process is needed; to be called before others look for it

  // The others can do without this rank of this process from allow_loss() to forbid_loss(). The latter gives why the
  // process was lost in between; "" if it was not.
  void allow_loss(int rank);
  std::string forbid_loss(int rank);
  std::string forbid_loss();  // for all ranks and for good: this process is about to say something to all

  bool declare(int process, const std::string& why);  // see declare_lost

  // Looks into the store. Gives whether a process was lost since the last look. Only one thread may call it.
  bool refresh();

  // These tell what is known by now.
  int count() const;
  size_t count_among(const std::vector<int>& ranks) const;
  bool is_lost(int process) const;
  std::string own_reason() const;                             // why this process is lost, as its own error, or ""
  std::string reason_of(int rank) const;                      // why another process's rank is lost, or ""
  std::string reason_to_give_up(const OpenCall& call) const;  // why a rank that `call` needs is lost, or ""

  // Keeps the buffers of a half-received message until the connections close. If the peer only stood still, Gloo will
  // still write into them.
  void keep_buffers(const c10::intrusive_ptr<c10d::Work>& work);

 private:
  std::string note_own(const std::string& why);

  const StorePtr store_;
  const Roster roster_;
  const int process_;
  const bool allowed_;
  int64_t seen_ = 0;  // the count in the store; only refresh() uses it

  std::mutex changing_;              // held while this process's status changes
  std::set<int> dispensable_;        // of this process's ranks; guarded by changing_, as the next one
  bool has_spoken_ = false;          // and stays needed
  mutable std::mutex mutex_;         // guards what follows
  std::map<int, std::string> lost_;  // by process: why
  std::vector<c10::intrusive_ptr<c10d::Work>> kept_;
};

}  // namespace lockstep::comm
