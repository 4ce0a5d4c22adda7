// Finds the split that --plan means: that of a plan's file, or the best one that can be found here and now.
#pragma once

#include <lockstep/plan/plan.hpp>
#include <lockstep/trainer/trainer.hpp>

#include <string>

namespace lockstep::cli {

// Gives the devices that the plan in `file` is for; none if it is for a described cluster. Throws Error, which names
// the file, if a device is not here.
Devices devices_of(const Plan& plan, const std::string& file);

// Splits the options' network as the plan in `file` says. Throws Error unless the plan was made for this network and
// for as many devices as there are. (Under a launcher the number of ranks is checked when all have come.)
void follow(const Plan& plan, const std::string& file, TrainOptions& options);

// Measures the network of the options on their devices, and splits the network in the best way. Returns a line that
// says how. Under a launcher call it on all processes. With --grain this and follow() leave the plan's microbatches
// out, since the grains are the microbatches. Throws Error as measure_model() and candidate_plans() do.
std::string plan_here(TrainOptions& options);

}  // namespace lockstep::cli
