// The flags of `lockstep train` that say how large a batch is and what becomes of its gradient.
#pragma once

#include <CLI/CLI.hpp>
#include <lockstep/trainer/trainer.hpp>

#include <cstdint>
#include <optional>
#include <string>

namespace lockstep::cli {

struct UpdateFlags {
  std::optional<int64_t> batch_size, scale_batch, reference_batch;
  std::optional<int> accumulate;
  std::optional<std::string> balance, optimizer, scale_lr, schedule, step_epochs;
  std::optional<double> lr, momentum, weight_decay, clip, warmup, step_factor;
};

void add_flags(CLI::App& app, UpdateFlags& flags);

// Those that were given, in place of what the options have. Throws Error: a name that is not there. A schedule other
// than step takes the options' step epochs back.
void apply(const UpdateFlags& flags, TrainOptions& options);

}  // namespace lockstep::cli
