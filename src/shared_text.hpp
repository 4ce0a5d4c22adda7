// A text that rank 0 has and all ranks need.
#pragma once

#include <lockstep/rank.hpp>

#include <string>

namespace lockstep {

// Rank 0's `text`, on every rank. Collective. Throws Error as Rank::broadcast.
std::string shared_text(const std::string& text, Rank& rank);

}  // namespace lockstep
