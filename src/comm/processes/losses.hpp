// Losses: which processes of a run are gone while the others go on without them.
//
// A process is bound: if it is gone, the run has failed. While all of its ranks are released, because the others can do
// without them, it is free: if it is gone then, it is lost, and stays so. Each of these changes is one comparison in
// the store, so that all processes agree on who was lost, and one that only stood still learns it when it comes back.
//
// Keys in the store: standing/<process> ("bound", "free", or "lost: " and why), losses (a count that grows when
// somebody was lost). Thread-safe.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "comm/meeting/layout.hpp"
#include "comm/meeting/rendezvous.hpp"
#include "rank_state.hpp"

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace lockstep::comm {

// `process` of the run whose keys `store` holds is gone: whether the others go on without it. `why` is a sentence; what
// another process said before stays.
bool declare_lost(c10d::Store& store, int process, const std::string& why);

bool is_lost(c10d::Store& store, int process);

class Losses {
 public:
  // Not `allowed`: every process stays bound, and nothing is asked of the store.
  Losses(StorePtr store, Layout layout, int process, bool allowed);

  void begin();  // this process is bound; before others look for it

  // The others can do without this rank of this process, until bind(), which gives why the process was lost in between:
  // "" if it was not.
  void release(int rank);
  std::string bind(int rank);

  bool declare(int process, const std::string& why);  // see declare_lost

  // Looks into the store; whether somebody was lost since. For one thread.
  bool learn();

  // For a process that is about to say something to all: why the others have gone on without it, or "" if they have
  // not. In that case it is bound from here on.
  std::string speak_up();

  // What is known by now.
  std::string why_out() const;                          // why this process is lost, as its own error; "" if it is not
  std::string why(int rank) const;                      // why another one's rank is; "" if it is not
  std::string why_in_vain(const OpenCall& call) const;  // "" if no rank that `call` needs was lost
  int processes() const;                                // how many are lost
  bool is_lost(int process) const;
  size_t ranks(const std::vector<int>& among) const;  // how many of these are lost

  // The buffers of a message that may have come in part stay until the connections are closed: the transport would
  // otherwise ask for them without end, should a process that stood still come back.
  void keep(const c10::intrusive_ptr<c10d::Work>& work);

 private:
  std::string note_own(const std::string& why);

  const StorePtr store_;
  const Layout layout_;
  const int process_;
  const bool allowed_;
  int64_t seen_ = 0;  // of the count in the store; of learn() alone

  std::mutex changing_;              // held while this process's standing changes
  std::set<int> released_;           // of this process's ranks; guarded by changing_
  mutable std::mutex mutex_;         // guards what follows
  std::map<int, std::string> lost_;  // by process: why
  std::vector<c10::intrusive_ptr<c10d::Work>> kept_;
};

}  // namespace lockstep::comm
