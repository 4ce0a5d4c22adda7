// Asks the CUDA part of LibTorch for a GPU's name and place. CMake takes cuda_info.cpp or no_cuda_info.cpp.
#pragma once

#include <string>

namespace lockstep {

// Gives the driver's name of GPU `index`, or "" if this build has no CUDA part.
std::string gpu_name(int index);

// Gives the driver's name of GPU `index` and its compute capability, or "" like gpu_name.
std::string gpu_kind(int index);

// Gives the place of GPU `index` on this machine's PCI bus, which is the same in every process, whatever the index
// there; "" like gpu_name. MIG slices of one GPU have one place.
std::string gpu_address(int index);

}  // namespace lockstep
