#include "faults.hpp"

#include "simulated_gpu/nccl/communicator.hpp"
#include "support/simulated_device.hpp"

#include <utility>

void lockstep::plant_in_nccl(const std::string& where, std::function<void()> fault) {
  auto& faults = ::simulated::faults();
  (where == "init" ? faults.in_init : where == "kernel" ? faults.in_kernel : faults.in_shutdown) = std::move(fault);
}

void lockstep::drop_reports() {
  simulated::take_reports();
}
