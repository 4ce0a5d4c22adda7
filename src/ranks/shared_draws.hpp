// Watches what draws from LibTorch's CPU generator, which the ranks of one process share.
#pragma once

#include <lockstep/ranks/rank.hpp>

#include <string>

namespace lockstep {

// Warns, once in a run, of `layer` of `owner`, which draws from that generator, if the process has several ranks. Does
// nothing if `layer` is empty.
void warn_of_shared_draws(const Rank& rank, const std::string& owner, const std::string& layer);

}  // namespace lockstep
