// Reads what --plan means for a run: the split of a plan's file, or the best split that can be found here and now.
#pragma once

#include <lockstep/plan/plan.hpp>
#include <lockstep/trainer/trainer.hpp>

#include <string>

namespace lockstep::cli {

// Whether --plan names a file, and not "auto" or "none".
bool is_file(const std::string& plan);

// Throws Error, which names the file, if it cannot be read, or if the plan is for devices that are not here.
Plan read_train_plan(const std::string& file);
Devices devices_of(const Plan& plan, const std::string& file);  // empty: the plan is for a described cluster

// Splits the options' network as the plan in `file` says. Throws Error unless the plan was made for this network and
// for as many devices as there are. (Under a launcher the number of ranks is checked when all have come.)
void follow(const Plan& plan, const std::string& file, TrainOptions& options);

// Measures the options' network on their devices, and splits it in the best way. Returns a line that says how. Under a
// launcher call it on all processes. With --grain this and follow() leave the plan's microbatches out, since the grains
// are the microbatches. Throws Error as measure_model() and candidate_plans() do.
std::string plan_here(TrainOptions& options);

}  // namespace lockstep::cli
