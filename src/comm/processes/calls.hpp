// Calls: counts the calls that a rank of a run in several processes has made. So at the end of the run a call is found
// that nobody answered.
#pragma once

#include <ATen/core/Tensor.h>

#include "comm/meeting/roster.hpp"

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::comm {

// Gives " (collective call 3)" or " (collective call 3 of a group)".
std::string text_of_number(int64_t number, const std::string& group);

// These are the collective calls among some ranks: all ranks, or a group's.
struct CollectiveCalls {
  void add(const std::string& text);
  std::string text_of(int64_t number) const;  // gives "" if it is not among the recent ones
  std::string last() const { return recent.empty() ? "" : recent.back(); }

  int64_t count = 0;
  std::vector<std::string> recent = {};  // the last few: "allreduce(sum) of float [2]"
  int64_t complete = 0;      // the number that came about, as this rank alone knows; no other process hears of it
  uint64_t fingerprint = 0;  // a hash of all texts, in order
};

struct Calls {
  explicit Calls(size_t world_size = 0) : collective{{"", {}}}, sent(world_size, 0), received(world_size, 0) {}

  std::map<std::string, CollectiveCalls> collective;  // calls by the group's name; "": all ranks
  std::vector<int64_t> sent, received;                // messages, in groups too, by the other rank
  std::string last = {};  // the last call of all: "allreduce(sum) of float [2] (collective call 3)", "send 4 to rank 1"

  // Gives the calls in the group of this name, or none if the rank does not know the group.
  const CollectiveCalls& of(const std::string& group) const;

  std::string to_text() const;
  static Calls from_text(const std::string& text, size_t world_size);  // throws if it is not of such a world
};

// Ask this when all ranks are done, each without an error. Says which call came about on some ranks only, and whose is
// missing, or whose calls differ although their number is equal. Gives "" if all calls fit together. Calls that a rank
// waited for fit in any case.
std::string unanswered(const std::vector<Calls>& by_rank, const Roster& roster);

// A CallLog has the calls of this process's ranks. It is thread-safe.
class CallLog {
 public:
  CallLog(const Range& ranks, size_t world_size);

  void join(int rank, const std::string& group);  // makes the rank a member from now on
  int64_t add_collective(int rank, const std::string& group, const std::string& text);  // gives its number in the group
  // Notes which memory this call changes, until complete on all ranks of this process that are members. Gives another
  // rank whose call of this number changes some of that memory too, or nothing.
  std::optional<int> changes(int rank, const std::string& group, int64_t number, const at::Tensor& memory);
  void complete(int rank, const std::string& group, int64_t number);  // says that this call came about
  int64_t add_message(int rank, int peer, bool sends);                // gives how many there are now in this direction
  Calls of(int rank) const;

 private:
  mutable std::mutex mutex_;
  std::map<int, Calls> by_rank_;                                                  // guarded by mutex_, as the next one
  std::map<std::pair<std::string, int64_t>, std::map<int, at::Tensor>> changed_;  // changed memory, by call and rank
};

}  // namespace lockstep::comm
