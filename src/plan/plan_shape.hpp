// Checks a plan before its net is known.
#pragma once

#include <lockstep/plan/plan.hpp>

#include <cstdint>

namespace lockstep {

// Throws Error, which says what would fit: a number below 1, several stages per rank without the interleaved schedule,
// more stages than `layers`, cuts that are not as many as the stages need, not ascending, or not within the layers.
void check_plan_shape(const Plan& plan, int64_t layers);

}  // namespace lockstep
