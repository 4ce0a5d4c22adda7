// Watches what the ranks of one process do to the seed of LibTorch's CPU generator, which they share.
#pragma once

#include <lockstep/ranks/rank.hpp>

#include <cstdint>

namespace lockstep {

uint64_t shared_seed();  // of LibTorch's CPU generator, as it is now

// Warns, once in a run, if its threads share LibTorch's CPU generator and one has set its seed outside of in_turn().
void warn_of_shared_seed(const Rank& rank);

}  // namespace lockstep
