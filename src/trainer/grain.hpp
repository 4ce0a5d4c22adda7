// What a run with a grain (BatchSettings::grain) asks of its other options and of its devices.
#pragma once

#include <lockstep/trainer/train_options.hpp>

#include <cstdint>
#include <string>

namespace lockstep {

// Throws Error for what cannot give the same bits on any number of ranks. Without a grain it checks only that.
void check_grain(const TrainOptions& options);

// What to tell the user if a batch has fewer grains than `ranks` along the data axis; or else empty.
std::string remark_on_idle_ranks(const BatchSettings& batch, int ranks);

}  // namespace lockstep
