// The flags of `lockstep train` that say what its devices send each other, and how often.
#pragma once

#include <CLI/CLI.hpp>
#include <lockstep/trainer/trainer.hpp>

#include <cstdint>
#include <optional>
#include <string>

namespace lockstep::cli {

struct CommunicationFlags {
  std::optional<std::string> compress;
  std::optional<int64_t> compress_rank, sync_every;
  std::optional<double> outer_lr, outer_momentum;
};

void add_flags(CLI::App& app, CommunicationFlags& flags);

// Those that were given, in place of what the options have. Another compression takes the options' rank back, and
// averages at every step take the outer optimizer's settings back.
void apply(const CommunicationFlags& flags, TrainOptions& options);

}  // namespace lockstep::cli
