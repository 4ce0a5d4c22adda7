// Tells whether the ranks of a run compute on several kinds of processor (devices/processor_kind.hpp). These round
// differently: results depend on who computes what, and copies of one network drift apart.
#pragma once

#include "comm/world.hpp"

#include <string>

namespace lockstep {

// Names two ranks of two kinds, for texts: "rank 1 (cpu) computes on DEFAULT 1a2b3c4d, and rank 0 (cpu) on AVX512 …".
// Gives "" if all are of one kind, as far as anybody knows.
std::string mixed_processors(const comm::World& world);

}  // namespace lockstep
