// optim: optimizers, their state and their learning rates.
//   finite         has_finite_gradients: may a step be taken?
//   lamb           layer-wise adaptive moments
//   lars           layer-wise adaptive rate scaling
//   learning_rate  schedules, warm-up, and scaling with the batch
//   optimizers     optimizers by their names
#pragma once

#include <lockstep/optim/finite.hpp>
#include <lockstep/optim/lamb.hpp>
#include <lockstep/optim/lars.hpp>
#include <lockstep/optim/learning_rate.hpp>
#include <lockstep/optim/optimizers.hpp>
