// Watches how the ranks of one process change the seed of LibTorch's CPU generator, which they share.
#pragma once

#include <lockstep/ranks/rank.hpp>

#include <cstdint>
#include <string>

namespace lockstep {

uint64_t shared_seed();  // gives the seed of LibTorch's CPU generator, as it is now

// Accepts the seed as it is now.
void keep_shared_seed(const Rank& rank);

// Warns, once in a run, if the threads share LibTorch's CPU generator and one has set the seed outside of in_turn().
void warn_of_shared_seed(const Rank& rank);

// Warns likewise of `layer` of `owner`, which draws from that generator. Does nothing if `layer` is empty.
void warn_of_shared_draws(const Rank& rank, const std::string& owner, const std::string& layer);

}  // namespace lockstep
