// Whether one rank computes so slowly that the others wait for it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

// What a rank has trained, without its waits for other ranks; waits for data count.
struct RankTime {
  double seconds = 0;
  int64_t samples = 0;
};

// The slowest rank in words, with the times of `epochs` together. Empty unless it takes at least three times as long
// per sample as the median of the others, and makes them wait for a second per epoch or more.
std::string straggler_of(const std::vector<RankTime>& ranks, int64_t epochs, const std::vector<std::string>& names);

}  // namespace lockstep
