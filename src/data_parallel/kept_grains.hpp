// KeptGrains: what one rank has computed of a step that broke off, in an elastic job.
//
// Another process is gone, and the others finish the step, with its grains shared out anew
// (trainer/kept_step.hpp). This rank then leaves out the grains that are here. They count as if it computed them now:
// with the same bits.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/data/parts.hpp>

#include "grain_statistics.hpp"
#include "grain_sums.hpp"

#include <cstdint>
#include <map>
#include <string>

namespace lockstep {

using KeptGradients = std::map<std::string, GrainSums::Partial>;  // by parameter

struct KeptGrains {
  Range grains;
  KeptGradients gradients;              // summed over these grains
  std::map<int64_t, at::Tensor> means;  // of the loss, by grain
  GrainStatistics::Notes notes;
};

}  // namespace lockstep
