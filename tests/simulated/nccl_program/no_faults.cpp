// A build with CUDA has this in the place of faults.cpp.
#include <lockstep/base/error.hpp>

#include "faults.hpp"

void lockstep::plant_in_nccl(const std::string& where, std::function<void()>) {
  throw Error("NCCL itself has no fault in its " + where);
}

void lockstep::drop_reports() {}
