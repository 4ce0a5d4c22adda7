// Members are ranks of a run that make collective calls together: all ranks, or a group that Rank::group made.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

namespace lockstep::comm {

// A group numbers its ranks anew, in the order of the world's numbers.
struct Members {
  std::string name = {};        // the group's name, unique in its run; empty: the whole world
  std::vector<int> ranks = {};  // numbers in the world, by number in the group

  int size() const { return static_cast<int>(ranks.size()); }
  int index_of(int world_rank) const {
    return static_cast<int>(std::lower_bound(ranks.begin(), ranks.end(), world_rank) - ranks.begin());
  }
  // Gives " among ranks 0, 2", where a call took place, or nothing for the world.
  std::string text() const {
    if (name.empty()) return "";
    std::string list;
    for (const int rank : ranks) list += (list.empty() ? "" : ", ") + std::to_string(rank);
    return " among ranks " + list;
  }
};

}  // namespace lockstep::comm
