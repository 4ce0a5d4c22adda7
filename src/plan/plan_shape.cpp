#include "plan_shape.hpp"

#include <lockstep/base/error.hpp>

#include <string>

namespace lockstep {

void check_plan_shape(const Plan& plan, int64_t layers) {
  if (plan.batch_size < 1) {
    throw Error("plan: batch_size is " + std::to_string(plan.batch_size) + "; it must be at least 1");
  }
  try {
    check_split(plan.split, layers);
    if (plan.split.cuts.empty() && plan.split.stages() > 1) {
      throw Error(std::to_string(plan.split.stages()) + " stages need " + std::to_string(plan.split.stages() - 1) +
                  " cuts, and there are 0");
    }
  } catch (const Error& error) {
    throw Error(std::string("plan: ") + error.what(), error.data());
  }
}

}  // namespace lockstep
