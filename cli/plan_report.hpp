// Writes the texts of lockstep plan: a profile's layers, the candidates, and the choice.
#pragma once

#include <lockstep/plan/model_profile.hpp>
#include <lockstep/plan/plan.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::cli {

// Gives a line per layer: bytes, and milliseconds for `samples` samples on the device that measured them.
std::string layer_table(const ModelProfile& profile, int64_t samples);

// Gives a line for each of the first `most` plans. `alone` is the prediction of one device for the same batch.
std::string candidate_table(const std::vector<Plan>& plans, const Prediction& alone, size_t most);

// Says the plan in words: the mesh, the stages by the names of their layers, and the cost.
std::string in_words(const Plan& plan, const ModelProfile& profile, const Prediction& alone);

}  // namespace lockstep::cli
