// An Operation is one call of all its members, from the first post to the last share of work. The Exchange brings the
// members together.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "comm/members.hpp"
#include "comm/signature.hpp"
#include "streams.hpp"

#include <atomic>
#include <chrono>
#include <compare>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace lockstep::comm {

class Operation;

// A Call is one rank's call. Its tensors are contiguous.
struct Call {
  Signature signature;
  c10::SmallVector<at::Tensor, 2> in = {};   // tensors that the work reads
  c10::SmallVector<at::Tensor, 2> out = {};  // tensors that the work writes; those changed in place are in `in` alone
  std::vector<std::pair<at::Tensor, at::Tensor>> back = {};  // afterwards first.copy_(second)
  int shares = 1;  // the number of shares of the work, for several ranks at once
  std::function<void(const Operation&, int share)> work = {};  // share = 0 … shares - 1; the first member's is used
  std::function<std::string(const Operation&)> check = {};     // run once all have posted; says what does not fit
};

// The source of a receive that takes the first message of any rank.
constexpr int kAnySource = -1;

// A message's place: the n-th post on one side meets the n-th on the other.
struct Side {
  int source;
  int destination;
  int tag;
  auto operator<=>(const Side&) const = default;  // NOLINT(modernize-use-nullptr): clang-tidy 14 takes it for a 0
};

class Operation {
 public:
  struct Member {
    int rank;  // its number among the members
    bool posted = false;
    Call call = {};
    std::chrono::steady_clock::time_point time = {};  // the time of its post
    ReadyMark ready = {};                             // marks the rank's stream at its call
  };

  // Keep `of` longer than the operation.
  Operation(const Members& of, uint64_t number);   // makes the members' collective call `number`
  Operation(const Members& of, const Side& side);  // makes a message, perhaps from kAnySource

  // Use these in work and check, which run once all members have posted.
  const std::vector<Member>& members() const { return members_; }  // gives a collective's by ascending rank
  const Call& call(int rank) const;
  std::string text_of(int world_rank) const { return call(of_.index_of(world_rank)).signature.text(); }
  int shares() const { return members_[0].call.shares; }

  int source() const { return std::get<Side>(place_).source; }  // call it for a message that both sides have posted
  int in_world(int rank) const { return of_.ranks[rank]; }
  std::string title() const;          // gives "collective call 3" or "message 0 -> 1, tag 0 among ranks 0, 2"
  std::string where(int rank) const;  // gives the rank's call and the title: "barrier (collective call 3)"

 private:
  friend class Exchange;
  Member& member(int rank);
  void set_source(int rank);  // says that `rank` sends the message of a receive from any rank
  bool has_work() const { return posted_ && next_share_ < shares(); }

  const Members& of_;
  std::variant<uint64_t, Side> place_;
  std::vector<Member> members_;  // guarded by the Exchange until `posted_`, then read by all
  size_t posts_ = 0;
  std::atomic<bool> posted_ = false;  // all members have posted, and their calls fit together
  std::atomic<int> next_share_ = 0;
  std::atomic<int> finished_shares_ = 0;
  std::atomic<bool> complete_ = false;
  DoneMark done_;  // streams that read the results wait for it; set before complete_
};

}  // namespace lockstep::comm
