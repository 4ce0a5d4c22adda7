// What --plan means for a run: the split of a plan's file, or the best that can be found here and now.
#pragma once

#include <lockstep/plan/plan.hpp>
#include <lockstep/trainer/trainer.hpp>

#include <string>

namespace lockstep::cli {

// What --plan says: "auto", "none", or a file.
bool is_file(const std::string& plan);

// Throws Error that names the file: one that cannot be read, a plan for devices that are not here.
Plan read_train_plan(const std::string& file);
Devices devices_of(const Plan& plan, const std::string& file);  // empty: of a described cluster

// Splits the options' network as the plan of `file` says. Throws Error unless it was made for this network and for as
// many devices as there are (under a launcher the ranks' number is checked when all have come).
void follow(const Plan& plan, const std::string& file, TrainOptions& options);

// Measures the options' network on their devices, splits it as is best, and returns a line that says how. Under a
// launcher all processes must call it. Throws Error as measure_model() and candidate_plans().
std::string plan_here(TrainOptions& options);

}  // namespace lockstep::cli
