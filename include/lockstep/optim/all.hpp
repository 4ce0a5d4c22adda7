// optim: what optimizers need beside themselves. DataParallel's Optimizer: data_parallel/optimizer.hpp.
//   decay_groups   the parameters that weight decay suits, and the others
//   learning_rate  schedules, warm-up, and scaling with the batch
// Not in lockstep.hpp:
//   layer_wise     options of an optimizer that looks at whole layers
#pragma once

#include <lockstep/optim/decay_groups.hpp>
#include <lockstep/optim/learning_rate.hpp>
