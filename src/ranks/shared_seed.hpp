// What the ranks of one process, who share LibTorch's CPU generator, do to its seed.
#pragma once

#include <lockstep/ranks/rank.hpp>

namespace lockstep {

// Warns, once in a run, if its threads share LibTorch's CPU generator and one has set its seed outside of in_turn().
void warn_of_shared_seed(const Rank& rank);

}  // namespace lockstep
