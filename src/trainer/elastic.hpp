// What train() does in an elastic job, whose processes change: which options go with that, and how a generation's ranks
// get one state to go on from.
#pragma once

#include <lockstep/ranks/rank.hpp>
#include <lockstep/trainer/train_options.hpp>

#include <optional>

#include "data_parallel/twice_kept.hpp"
#include "run_state.hpp"

namespace lockstep {

// Throws Error that says why the options cannot be elastic, and what to do.
void check_elastic(const TrainOptions& options);

// What a rank leaves of an optimizer whose slices are kept twice, also in the middle of a step: pieces of its state,
// and of the parameters, which `state.tensors` has and then lacks. Ends the use of the optimizer.
void put_pieces(TwiceKept& kept, RunState& state);

// The most advanced rank's state goes to those behind, and to those that have none. Copies of the same step are the
// same (docs/same-bits.md), so nobody has to vote. What ranks have in pieces is put together, of the first rank that
// has each; then every rank has all of it. All ranks must call it. Cost: one small exchange if all are equal and have
// no pieces, else the state goes to every rank. If it throws, `state` is as it was, or what the others get. Throws
// StateLost (joined_pieces.hpp).
void hand_over(std::optional<RunState>& state, Rank& rank);

}  // namespace lockstep
