// check_arithmetic: finds ranks that compute wrongly, while a net trains.
//
//   lockstep::DataParallel net(module, rank, {.grain_check = lockstep::check_arithmetic(0.01)});
//
// A grain's gradients do not depend on the rank that computes it (docs/same-bits.md). So if two ranks get different
// bits, one of them computes wrongly. Cost: about this fraction of a step's time, and the samples of the grains that
// are checked go to all ranks.
#pragma once

#include <memory>

namespace lockstep {

class GrainCheck;

// `fraction` is above 0 and at most 1. This fraction of the grains (BatchOptions::grain) is computed again by another
// rank, after backward, and compared to the bit. If bits differ, all ranks compute that grain again, and backward()
// throws Error on all ranks. Its text names the rank that most others contradict. With two ranks a third opinion is
// missing: a rank that contradicts itself is named, or else both are. Training's bits stay the same. With one rank
// nothing is computed again. A function or criterion given to loss() is called again, also by ranks that do not own the
// samples, until backward() has returned; SampleScope::current()->place().again is true then. Throws Error for another
// fraction.
std::shared_ptr<GrainCheck> check_arithmetic(double fraction);

}  // namespace lockstep
