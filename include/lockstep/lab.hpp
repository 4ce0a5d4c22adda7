// lab has other ways to train than one average of gradients per step, queued kernel by kernel. It is a wing: component
// lab, target lockstep::lab.
//   lab/balance              parts of each batch in proportion to the devices' speeds
//   lab/check_arithmetic     grains that another rank computes again
//   lab/half_precision_hook  gradients travel in bfloat16 or float16
//   lab/lamb                 layer-wise adaptive moments
//   lab/lars                 layer-wise adaptive rate scaling
//   lab/local_sgd            several steps alone, then an average of the parameters (DiLoCo)
//   lab/loss_scaler          the scale of losses in float16
//   lab/optimizers           optimizers by their names
//   lab/power_sgd            gradients travel as products of two thin matrices
//   lab/recorded             a loop's step as one CUDA graph
//   lab/weight_average       an exponential moving average of the weights (EMA)
//   server/parameter_server  ParameterServer: servers keep the parameters, workers compute gradients
// src/lab/README.md says how it works.
#pragma once

#include <lockstep/lab/balance.hpp>
#include <lockstep/lab/check_arithmetic.hpp>
#include <lockstep/lab/half_precision_hook.hpp>
#include <lockstep/lab/lamb.hpp>
#include <lockstep/lab/lars.hpp>
#include <lockstep/lab/local_sgd.hpp>
#include <lockstep/lab/loss_scaler.hpp>
#include <lockstep/lab/optimizers.hpp>
#include <lockstep/lab/power_sgd.hpp>
#include <lockstep/lab/recorded.hpp>
#include <lockstep/lab/weight_average.hpp>
#include <lockstep/server/parameter_server.hpp>
