// Copies of modules that every rank holds whole.
#pragma once

#include <torch/nn/module.h>
#include <lockstep/ranks/rank.hpp>

#include <memory>

namespace lockstep {

// Copies what clone() leaves out: which parameters are frozen, and the mode.
void take_over_flags(const torch::nn::Module& from, torch::nn::Module& to);

// A clone on the rank's device, with the same flags.
std::shared_ptr<torch::nn::Module> whole_copy(const torch::nn::Module& module, const Rank& rank);

}  // namespace lockstep
