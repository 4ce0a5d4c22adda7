// Chooses the ranks and threads of `lockstep train` on CPUs, where the user leaves them open.
#pragma once

#include <lockstep/trainer/trainer.hpp>

#include "train_flags.hpp"

namespace lockstep::cli {

// Tells whether the program chooses: for LeNet, the MLP and the GPT on CPU cores, in one process, if the user gave no
// option that has to do with ranks.
bool leaves_ranks_open(const TrainFlags& flags, const TrainOptions& options);

// Takes the fastest of a rank per core, half as many ranks of two threads, and one rank of all threads. Up to 16 steps
// of the options' network are measured, once: the cache folder keeps the choice (io/kept_choice.hpp). Returns false
// without such a folder, or with a step of more than 0.3 s: then a network has a rank per core, as before.
bool choose_ranks(TrainOptions& options);

}  // namespace lockstep::cli
