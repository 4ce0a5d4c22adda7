#include "plan_shape.hpp"

#include <lockstep/error.hpp>

#include <string>

namespace lockstep {
namespace {

std::string text_of(const std::vector<int64_t>& cuts) {
  std::string text = "[";
  for (const int64_t cut : cuts) text += (text.size() > 1 ? ", " : "") + std::to_string(cut);
  return text + "]";
}

}  // namespace

void check_plan_shape(const Plan& plan, int64_t layers) {
  const auto at_least_1 = [](const std::string& what, int64_t value) {
    if (value < 1) throw Error("plan: " + what + " is " + std::to_string(value) + "; it must be at least 1");
  };
  at_least_1("mesh.data", plan.mesh.data);
  at_least_1("mesh.pipeline", plan.mesh.pipeline);
  at_least_1("mesh.tensor", plan.mesh.tensor);
  at_least_1("batch_size", plan.batch_size);
  at_least_1("stages_per_rank", plan.stages_per_rank);
  at_least_1("microbatches", plan.microbatches);
  if (plan.stages_per_rank > 1 && plan.schedule != Schedule::interleaved) {
    throw Error("plan: stages_per_rank is " + std::to_string(plan.stages_per_rank) + " and the schedule is " +
                std::string(to_string(plan.schedule)) +
                "; only the interleaved schedule has more than 1 stage per rank");
  }
  const int64_t stages = int64_t{plan.mesh.pipeline} * plan.stages_per_rank;
  const std::string which = std::to_string(plan.mesh.pipeline) + " pipeline ranks with " +
                            std::to_string(plan.stages_per_rank) + " stages each";
  if (stages > layers) {
    throw Error("plan: " + which + " are " + std::to_string(stages) + " stages; a net of " + std::to_string(layers) +
                " layers has at most " + std::to_string(layers));
  }
  if (static_cast<int64_t>(plan.cuts.size()) != stages - 1) {
    throw Error("plan: " + which + " need " + std::to_string(stages - 1) + " cuts, and there are " +
                std::to_string(plan.cuts.size()) + ": " + text_of(plan.cuts));
  }
  int64_t before = 0;
  for (const int64_t cut : plan.cuts) {
    if (cut <= before || cut >= layers) {
      throw Error("plan: the cuts " + text_of(plan.cuts) + " are not those of a net of " + std::to_string(layers) +
                  " layers: they must ascend, from 1 to " + std::to_string(layers - 1));
    }
    before = cut;
  }
}

}  // namespace lockstep
