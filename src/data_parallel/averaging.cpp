#include "averaging.hpp"

#include <lockstep/base/error.hpp>

#include "base/exception_text.hpp"

#include <exception>

namespace lockstep {

void Averaging::average_during(const std::function<void()>& backward, const PartSizes& sizes) {
  if (!failure_.empty()) throw Error(failure_);
  backward_name_ = "DataParallel's backward " + std::to_string(++backwards_);
  try {
    average(backward, sizes);
  } catch (...) {
    // Posting the rest would let the others go on with gradients that lack this rank's part. So this rank stays out of
    // step, and whoever waits for it is told when it leaves or makes another call.
    failure_ =
        name_ + ": an earlier backward of this rank failed before its gradients were averaged, so it is out " +
        "of step with the other ranks. End the run there. What failed: " + exception_text(std::current_exception());
    try {
      abandon();
    } catch (const std::exception&) {  // of a device that has failed too; what failed first counts
    }
    throw;
  }
}

}  // namespace lockstep
