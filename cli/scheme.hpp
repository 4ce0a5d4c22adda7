// Scheme: one way to split a network over devices. Training it measures what it costs.
#pragma once

#include <lockstep/data/data.hpp>
#include <lockstep/devices/devices.hpp>
#include <lockstep/layout/model_split.hpp>
#include <lockstep/models/models.hpp>

#include <cstdint>
#include <string>

namespace lockstep::cli {

struct Scheme {
  std::string name;
  Devices devices;
  ModelSplit split;
  int zero_stage = 0;  // of a split by data alone, as Sharded has them; 0: every rank has all of the optimizer
};

struct SchemeOptions {
  ModelOptions model;
  int64_t batch_size = 256;  // of the global batch
  int steps = 20;            // measured ones; two before them warm up
  double lr = 0.05;          // of SGD with momentum 0.9
  int threads_per_rank = 1;
};

struct SchemeCost {
  double step_seconds = 0;  // the median over the steps, of the slowest rank

  // Bytes of the fullest device:
  int64_t parameters = 0;  // parameters and buffers
  int64_t gradients = 0;
  int64_t optimizer_state = 0;
  int64_t activations = 0;  // all else that was in memory at a step's peak, with its part of the batch

  double bytes_sent = 0;  // per step, by the rank that sends most
  double idle_share = 0;  // share of the steps' time, mean of the ranks, that is not in layers, loss or update
  double final_loss = 0;  // of the last step's global batch

  int64_t memory() const { return parameters + gradients + optimizer_state + activations; }
};

// Samples of the options' steps, and of those before them.
int64_t samples_needed(const SchemeOptions& options);

// Throws Error if `images` are too few for the options' steps.
void check_images(const SchemeOptions& options, const Dataset& images);

// Trains the model from its seed on the first batches of `images`, split as the scheme says. In an allreduce each rank
// counts as sending 2 (k - 1) / k of its bytes, as a ring does. Threads of one process share memory and need not send
// it all. `images` must have passed check_images. Throws Error as run() and SplitModel do.
SchemeCost train_scheme(const Scheme& scheme, const SchemeOptions& options, const Dataset& images);

}  // namespace lockstep::cli
