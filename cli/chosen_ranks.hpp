// Chooses the ranks and threads of `lockstep train` on CPUs, where the user leaves them open.
#pragma once

#include <lockstep/trainer/trainer.hpp>

#include <string>

#include "train_flags.hpp"

namespace lockstep::cli {

// Tells whether the program chooses: on CPU cores, in one process, if the user gave no option that has to do with ranks.
bool leaves_ranks_open(const TrainFlags& flags, const TrainOptions& options);

// Takes the fastest of a rank per core, half as many ranks of two threads, and one rank of all threads, by steps of the
// options' network. That takes the time of some 12 steps, once: the cache folder keeps the choice.
void choose_ranks(TrainOptions& options);

}  // namespace lockstep::cli
