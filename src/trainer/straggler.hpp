// Tells whether one rank, or one stage of a pipeline, computes so slowly that the others wait for it.
#pragma once

#include <lockstep/layout/model_split.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

// Has a rank's time of training, without its waits for other ranks; waits for data count.
struct RankTime {
  double seconds = 0;  // NaN: nobody could measure them
  int64_t samples = 0;
};

// Says in words what is slow, with the times of `epochs` together. `names` are the ranks', which stand in a Mesh as
// `split` says. Ranks of one stage compute the same layers. Among these the slowest is named if it takes at least three
// times as long per sample as the median of the others, and makes the others wait for a second per epoch or more. If
// there is none, a stage is named that takes three times as long as the mean of the others, and a second more. Other
// stages compute other layers, so the text says that either the device or the division may be the reason. Gives "" if
// nothing is slow, or if a rank was not measured.
std::string straggler_of(const std::vector<RankTime>& ranks, int64_t epochs, const std::vector<std::string>& names,
                         const ModelSplit& split);

}  // namespace lockstep
