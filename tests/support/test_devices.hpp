// The devices of the tests' ranks: CPUs; or, where LOCKSTEP_TEST_DEVICES names some ("cuda:0,cuda:1"), those in turn.
// So the same tests run on simulated GPUs, and on GPUs.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/base/error.hpp>
#include <lockstep/devices/devices.hpp>

#include <cstddef>
#include <cstdlib>
#include <string>

#include "simulated_device.hpp"

namespace lockstep {

inline Devices test_devices(size_t count) {
  const char* const named = std::getenv("LOCKSTEP_TEST_DEVICES");
  if (named == nullptr) return Devices(count, c10::kCPU);
  const Devices some = parse_devices(named);
  Devices devices;
  for (size_t i = 0; i < count; ++i) devices.push_back(some[i % some.size()]);
  return devices;
}

// Whether ranks compute with CUDA's own kernels, whose last bits are not the CPU's.
inline bool on_real_gpus() {
  return std::getenv("LOCKSTEP_TEST_DEVICES") != nullptr && !simulated::is_there();
}

// GPUs of CUDA, real or simulated.
inline Devices gpus(int count) {
  Devices devices;
  for (int index = 0; index < count; ++index) devices.emplace_back(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
  return devices;
}

// Why the devices that are named are not to be had; "" if they are.
inline std::string missing_test_devices() {
  try {
    test_devices(1);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// A copy on the CPU, without history.
inline at::Tensor on_host(const at::Tensor& tensor) {
  return tensor.detach().to(at::kCPU, tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
}

}  // namespace lockstep
