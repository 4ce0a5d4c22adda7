// Scheme: one way to split a network over devices. Training with it measures the cost.
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
  int zero_stage = 0;  // stage of Sharded, for a split by data alone; 0: every rank has all of the optimizer
};

struct SchemeOptions {
  ModelOptions model;
  int64_t batch_size = 256;  // the size of the global batch
  int steps = 20;            // how many measured steps; two before them warm up
  double lr = 0.05;          // SGD's learning rate; its momentum is 0.9
  int threads_per_rank = 1;
};

struct SchemeCost {
  double step_seconds = 0;  // the slowest rank's seconds, the median over the steps

  // Bytes on the fullest device:
  int64_t parameters = 0;  // parameters and buffers
  int64_t gradients = 0;
  int64_t optimizer_state = 0;
  int64_t activations = 0;  // all other memory at a step's peak, with the rank's part of the batch

  double bytes_sent = 0;  // bytes per step, of the rank that sends most
  double idle_share = 0;  // the ranks' mean fraction of the steps' time outside of layers, loss and update
  double final_loss = 0;  // the loss of the last step's global batch

  int64_t memory() const { return parameters + gradients + optimizer_state + activations; }
};

// Says how many samples the options' steps, and those before them, take.
int64_t samples_needed(const SchemeOptions& options);

// Throws Error if `images` are too few for the options' steps.
void check_images(const SchemeOptions& options, const Dataset& images);

// Trains the model from its seed on the first batches of `images`, split as the scheme says. In an allreduce each rank
// counts as sending 2 (k - 1) / k of its bytes, as in a ring. (Threads of one process share memory and need not send
// all of it.) `images` must have passed check_images. Throws Error as run() and SplitModel do.
SchemeCost train_scheme(const Scheme& scheme, const SchemeOptions& options, const Dataset& images);

}  // namespace lockstep::cli
