// trainer: train(), its options and its runs. Storey 3.
//   fit            trains a network of your own; task and module_maker say what
//   metrics        what an epoch measured, and the files that keep it
//   train_options  all that a run can be told; batch_settings is a group of it, and way how ranks share the work
//   trainer        train() and evaluate_run(): all that the program does, without a terminal
//
// How it works. train() and fit() check the options and make a Workload of what is to be trained (named_models.cpp,
// fit.cpp). train.cpp takes the run folder and starts the ranks. rank_trainer.cpp is what each rank does between the
// first epoch and the last: its loop calls step.cpp for each batch. run_state.hpp is what a stopped run goes on from,
// and rank_trainer_state.cpp puts it together (docs/decisions/0011). option_table.hpp has a line for each option.
#pragma once

#include <lockstep/trainer/batch_settings.hpp>
#include <lockstep/trainer/fit.hpp>
#include <lockstep/trainer/metrics.hpp>
#include <lockstep/trainer/module_maker.hpp>
#include <lockstep/trainer/task.hpp>
#include <lockstep/trainer/train_options.hpp>
#include <lockstep/trainer/trainer.hpp>
#include <lockstep/trainer/way.hpp>
