// optim: optimizers, their state and their learning rates.
//   lamb           layer-wise adaptive moments
//   lars           layer-wise adaptive rate scaling
//   learning_rate  schedules, warm-up, and scaling with the batch
//   optimizers     optimizers by their names
#pragma once

#include <lockstep/optim/lamb.hpp>
#include <lockstep/optim/lars.hpp>
#include <lockstep/optim/learning_rate.hpp>
#include <lockstep/optim/optimizers.hpp>
