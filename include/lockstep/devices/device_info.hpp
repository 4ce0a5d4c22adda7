// device_info: tells a GPU's name and memory, and writes a list of devices as text.
//
// lockstep.hpp does not include it. Thread-safe. Cost: a query of the driver.
#pragma once

#include <lockstep/devices/devices.hpp>

#include <cstdint>
#include <string>

namespace lockstep {

struct GpuInfo {
  c10::Device device;
  std::string name;         // the driver's name; empty for other types than cuda, and without CUDA parts
  int64_t free_bytes = 0;   // the bytes of its memory that are free now; others may use the rest
  int64_t total_bytes = 0;  // the bytes of its memory; 0 where LibTorch cannot tell for this type
};

// Asks the driver for a GPU's name and memory. From then on this process uses the GPU: CUDA keeps some hundred MB of
// its memory. Throws Error, which names the GPU, if it is not there, is no GPU, or does not answer.
GpuInfo gpu_info(const c10::Device& gpu);

// Writes the list as the section prints it: "[cpu, cpu]", "[cuda:0]".
std::string to_string(const Devices& devices);

}  // namespace lockstep
