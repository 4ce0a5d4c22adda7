// An elastic job's processes change. This file says which options go with that, and gives a generation's ranks one
// state to go on from.
#pragma once

#include <lockstep/ranks/rank.hpp>
#include <lockstep/trainer/train_options.hpp>

#include <optional>

#include "run_state.hpp"

namespace lockstep {

// Throws Error that says why the options cannot be elastic, and what to do.
void check_elastic(const TrainOptions& options);

// Gives the most advanced rank's state to the ranks behind it, and to ranks without a state. Copies of the same step
// are the same (docs/same-bits.md), so nobody has to vote. Call it on all ranks. It costs one small exchange if all are
// equal; else the state goes to every rank. If it throws, `state` is the old one, or the one that the others get.
void hand_over(std::optional<RunState>& state, Rank& rank);

}  // namespace lockstep
