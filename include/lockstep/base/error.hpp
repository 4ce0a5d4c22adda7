// lockstep::Error: the one exception type of the library. Types derived from it say more of the reason.
//
// Its text names, as far as they are known, the rank, the device, the operation and what to do.
// When a rank fails for another reason (a c10::Error of LibTorch, a std::bad_alloc), run() rethrows
// an Error with the original exception nested in it (std::rethrow_if_nested).
#pragma once

#include <stdexcept>

namespace lockstep {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Ends a run since its user asked for that, in this process or in another one of the run.
class Stopped : public Error {
 public:
  using Error::Error;
};

}  // namespace lockstep
