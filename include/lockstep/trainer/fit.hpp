// fit: trains a network of your own, as train() trains lockstep's models; train() is written on it.
//
//   const auto result = lockstep::fit(
//       {.name = "prices", .module = [] { return PriceNet(); }, .criterion = torch::nn::functional::mse_loss,
//        .train = {{x, y}}, .test = {{test_x, test_y}}, .patience = 5},
//       {.epochs = 100, .keep = {.run_dir = "runs/prices"}});
//
// Everything that train() does goes with it: devices, processes, a split, precision, checkpoints, exact resumption, a
// grain. fit() is thread-safe for different run folders.
#pragma once

#include <lockstep/trainer/task.hpp>
#include <lockstep/trainer/trainer.hpp>

namespace lockstep {

// Options, results, files, errors and what a resumed run gives are those of train(), but
// - options.model and options.data are train()'s, and refused here; memory_format "automatic" is contiguous;
// - a run that goes on must have the name and ema_decay that its task had, and the same samples, with the same
//   weights or order. It compares the SHA-256 of samples in memory, and the number and version of samples that a
//   function reads. It cannot compare the network's code, the criterion and an optimizer of the task's own;
// - EpochMetrics::test holds the loss and the metrics of the test samples;
// - `lockstep eval` does not know the network; load_weights(run_dir / "model.safetensors", net) reads it.
//
// Batches come as batches() gives them: integers stay integers, but uint8 pixels in memory become float32 in [0, 1].
// The order of the samples depends on the seed and the epoch alone. With ema_decay, checkpoints have the trained
// weights; model.safetensors, metrics and EpochMetrics::weights are those of the average.
//
// Throws Error before the first step as train() does, and for a name that is empty or one of model_names(); a null
// module, and a split by layers or channels of one that is no torch::nn::Sequential; no training samples; tensors with
// different numbers of rows; values out of range; metrics without a name or a function, or with the same name; best_by
// that names no measure; metrics, best_by or patience without test samples; groups without an optimizer. Throws Error
// later, with the rank named, for groups that leave out a parameter or have one twice; a criterion, a metric or an
// optimizer's function with a wrong result; accuracy where y holds no classes; and as Samples::read() does.
TrainResult fit(const Task& task, const TrainOptions& options = {}, const TrainCallbacks& callbacks = {});

}  // namespace lockstep
