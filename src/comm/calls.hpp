// Calls: what a rank of a run in several processes has called, counted, so that at the end of the run a call that
// nobody answered is found.
#pragma once

#include "comm/layout.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::comm {

struct Calls {
  explicit Calls(size_t world_size = 0) : sent(world_size, 0), received(world_size, 0) {}

  void add(const std::string& text);          // a collective call
  std::string text_of(int64_t number) const;  // of the rank's collective call; "" if it is not among the recent ones
  std::string last() const { return recent.empty() ? "" : recent.back(); }

  int64_t collective = 0;
  std::vector<std::string> recent = {};  // the last few collective ones: "allreduce(sum) of float [2]"
  uint64_t fingerprint = 0;              // of all of them, in order
  std::vector<int64_t> sent, received;   // messages, by the other rank

  std::string to_text() const;
  static Calls from_text(const std::string& text);
};

// When all ranks are done, each without an error: which call came about on some ranks only, and whose is missing; or
// whose calls were others although as many; "" if all fit together. Of calls that were waited for, neither happens.
std::string unanswered(const std::vector<Calls>& by_rank, const Layout& layout);

}  // namespace lockstep::comm
