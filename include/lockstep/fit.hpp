// fit has train() and fit(): whole runs, with their options, folders, checkpoints and metrics. It stands on the core
// and on all wings: component fit, target lockstep::fit.
//   trainer/fit            trains a net of your own, by task and module_maker
//   trainer/metrics        what an epoch measured, and the files that keep it
//   trainer/report         makes an HTML page of runs
//   trainer/train_options  all options of a run; made-up images too
//   trainer/trainer        train() and evaluate_run(): all that the program does, without a terminal
//   trainer/way            how the ranks share the work of a run
// src/trainer/README.md says how it works.
#pragma once

#include <lockstep/trainer/fit.hpp>
#include <lockstep/trainer/metrics.hpp>
#include <lockstep/trainer/module_maker.hpp>
#include <lockstep/trainer/report.hpp>
#include <lockstep/trainer/task.hpp>
#include <lockstep/trainer/train_options.hpp>
#include <lockstep/trainer/trainer.hpp>
#include <lockstep/trainer/way.hpp>
