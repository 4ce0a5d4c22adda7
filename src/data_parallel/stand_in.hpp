// Stand-ins: samples that a rank computes only because others compute at that time, where each use of a parameter is a
// call of all ranks. Nothing of the result is used. Pure functions.
#pragma once

#include <lockstep/data/data.hpp>
#include <lockstep/ranks/rank.hpp>

namespace lockstep {

// Gives two samples of the part, or one if the batch's grains have one: of one alone a BatchNorm may have no variance.
// A part without samples gives its example (Batch::like) twice. Throws Error, which names the rank, if the part has no
// example, or one of another type, device or shape than the part.
Batch stand_in_for(const Batch& part, const Rank& rank);

}  // namespace lockstep
