// Whether the calling thread is a rank of run(), and what all ranks of a process do to LibTorch's one CPU generator.
#pragma once

#include <lockstep/rank.hpp>

namespace lockstep {

bool is_rank_thread();

// Warns, once in a run, if its threads share LibTorch's CPU generator and one has set its seed outside of in_turn().
void warn_of_shared_seed(const Rank& rank);

}  // namespace lockstep
