// A RankState says in the store what a rank of a run in several processes waits for, or that it is done. blame.hpp
// concludes from the states who is to blame.
#pragma once

#include "calls.hpp"
#include "comm/members.hpp"

#include <cstdint>
#include <string>

namespace lockstep::comm {

// An OpenCall is a call that a rank waits in.
struct OpenCall {
  int rank = 0;
  int64_t number = -1;    // the call's number among the rank's collective calls in this group; -1: another kind of call
  Members among = {};     // the members of a collective call; without ranks: all
  std::string text = {};  // "allreduce(sum) of float [2]", "recv from rank 0 of float [2]"
  int peer = -1;          // the other rank of a message
  bool sends = false;     // this is a message's sender
  int64_t messages = 0;   // the number of this side's messages in this direction, this one included
  std::string message = {};  // a message's name, equal on both sides: "message 3 from rank 0 to rank 1, tag 7"
  std::string content = {};  // a message's content, to be equal on both sides: "float [2]"
  bool connects = false;     // this is no call: the rank connects a group
  bool polled = false;       // the rank asks for it again and again, and may do something else in between

  bool is_message() const { return peer >= 0; }
  bool concerns(int other) const;  // tells whether that rank makes this collective call too
  std::string place() const;       // gives "collective call 3 among ranks 0, 2", or the message
  std::string where() const;       // gives "allreduce(sum) of float [2] (collective call 3 among ranks 0, 2)"
};

struct RankState {
  enum class Kind { busy, waits, returned };
  Kind kind = Kind::busy;  // busy: nothing is known
  Calls calls = Calls();
  OpenCall call = {};  // valid if kind is `waits`

  std::string to_text() const;
  static RankState from_text(const std::string& text, size_t world_size);  // throws if it is not of such a world
};

}  // namespace lockstep::comm
