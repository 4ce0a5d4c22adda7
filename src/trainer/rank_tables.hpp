// Tables in a checkpoint, "ranks.NAME": what each rank has of a tensor, a row for each rank.
#pragma once

#include <lockstep/ranks/rank.hpp>

#include "io/safetensors.hpp"
#include "run_state.hpp"

namespace lockstep {

// Gathers each rank's tensors into tables. Call it on all ranks.
io::NamedTensors tables_of_all_ranks(const io::NamedTensors& mine, Rank& rank);

// Throws Error for a table that cannot be one. Whatever the digest says, a table is believed only as far as its shape
// goes.
void check_tables(const RunState& state);

}  // namespace lockstep
