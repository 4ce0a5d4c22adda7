// A text that one rank has and all ranks need.
#pragma once

#include <lockstep/rank.hpp>

#include <string>

namespace lockstep {

// The `text` of rank `root`, on every rank. Collective. Throws Error as Rank::broadcast.
std::string shared_text(const std::string& text, Rank& rank, int root = 0);

}  // namespace lockstep
