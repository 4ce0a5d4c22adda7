// trainer: train(), its options and its runs. Storey 3.
//   metrics        what an epoch measured, and the files that keep it
//   train_options  all that a run can be told
//   trainer        train() and evaluate_run(): all that the program does, without a terminal
#pragma once

#include <lockstep/trainer/metrics.hpp>
#include <lockstep/trainer/train_options.hpp>
#include <lockstep/trainer/trainer.hpp>
