// Asks the CUDA part of LibTorch for a GPU's name and identity. CMake takes cuda_info.cpp or no_cuda_info.cpp.
#pragma once

#include <string>

namespace lockstep {

// Gives the driver's name of GPU `index`, or "" if this build has no CUDA part.
std::string gpu_name(int index);

// Gives the driver's name of GPU `index` and its compute capability, or "" like gpu_name.
std::string gpu_kind(int index);

// Gives an identity of GPU `index` that is the same in every process, whatever the GPU's index there; "" like gpu_name.
std::string gpu_id(int index);

}  // namespace lockstep
