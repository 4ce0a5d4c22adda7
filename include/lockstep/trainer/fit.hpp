// fit: trains a network of your own, as train() trains lockstep's models; train() is written on it.
//
//   const auto result = lockstep::fit(
//       {.name = "prices", .module = [] { return PriceNet(); }, .criterion = torch::nn::functional::mse_loss,
//        .train = {{x, y}}, .test = {{test_x, test_y}}, .patience = 5},
//       {.epochs = 100, .keep = {.run_dir = "runs/prices"}});
//
// Everything that train() does goes with it: devices, processes, a split, precision, checkpoints, exact resumption, a
// grain. Thread-safe for different run folders.
#pragma once

#include <lockstep/trainer/task.hpp>
#include <lockstep/trainer/trainer.hpp>

namespace lockstep {

// Options, results, files, errors and what a resumed run gives are those of train(), but
// - options.model and options.data are train()'s, and refused here; memory_format "automatic" is contiguous;
// - a run that goes on must have its task's name, and the samples that it had, with their weights or order. Of samples
//   in memory it compares the SHA-256, of those that a function reads their number and version. It cannot compare the
//   network's code, the criterion and an optimizer of the task's own. The processes of a launcher compare the metrics'
//   names, the patience and the ema_decay too;
// - EpochMetrics::test holds the loss and the metrics of the test samples;
// - sync_batchnorm needs BatchNorms that convert_sync_batchnorm can replace;
// - `lockstep eval` does not know the network; load_weights(run_dir / "model.safetensors", net) reads it.
//
// Batches come as batches() gives them: integers stay integers, but uint8 pixels in memory become float32 in [0, 1].
// The order of the samples depends on the seed and the epoch alone. A run that goes on within an epoch does not read
// the samples before. With ema_decay a resumed run needs the same one, and the network's weights in a checkpoint are
// those that are trained; model.safetensors, metrics and EpochMetrics::weights are of the average.
//
// Throws Error before the first step, beside what train() refuses:
// - of the task: a name that is empty or one of model_names(); a null module; a split by layers or channels of a module
//   that is no torch::nn::Sequential;
// - of the samples: no training samples; tensors that have not as many rows;
// - of the update: an ema_decay not from 0 to below 1, or beside sync_every; `optimizer`, `momentum` or `weight_decay`
//   beside an optimizer of the task's own, or no `lr`; groups without such an optimizer;
// - of what is measured: a negative patience; a metric without a name or a function, or with another's name; best_by
//   that nothing is called; metrics, best_by or patience without test samples.
// And later, with the rank named: groups that leave out a parameter or have one twice; a function that makes no
// optimizer of its groups; a criterion or a metric that gives something else than it must; accuracy where y are no
// classes; and as Samples::read() does.
TrainResult fit(const Task& task, const TrainOptions& options = {}, const TrainCallbacks& callbacks = {});

}  // namespace lockstep
