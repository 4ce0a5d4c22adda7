// Partners: whose slice a rank keeps beside its own, where slices are kept twice (ShardedOptions::keep_twice).
#pragma once

#include <lockstep/ranks/rank.hpp>

#include <vector>

namespace lockstep {

// By rank: the rank whose slice it keeps too. `machines` has each rank's, as a number that is the same for those on one
// machine. Each slice has one keeper. As many slices as can be are kept on another machine; that is all of them unless
// one machine has more than half of the ranks. With one rank on each machine, and with one machine, it is the rank
// before. With one rank it is that rank.
std::vector<int> kept_ranks(const std::vector<int>& machines);

struct Partners {
  int kept = 0;    // the rank whose slice this one keeps
  int keeper = 0;  // the rank that keeps this one's
};
std::vector<Partners> partners_of_all(const Rank& rank);  // the same on all ranks, by the machines of its run
Partners partners_of(const Rank& rank);

}  // namespace lockstep
