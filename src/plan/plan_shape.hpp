// Checks a plan before its net is known.
#pragma once

#include <lockstep/plan/plan.hpp>

#include <cstdint>

namespace lockstep {

// Throws Error, which says what would fit: a number is below 1; there are several stages per rank without the
// interleaved schedule, or more stages than `layers`; cuts are fewer or more than the stages need, do not ascend, or do
// not lie within the layers.
void check_plan_shape(const Plan& plan, int64_t layers);

}  // namespace lockstep
