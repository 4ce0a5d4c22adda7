// What only the CUDA part of LibTorch can tell of a GPU. CMake takes cuda_info.cpp or no_cuda_info.cpp.
#pragma once

#include <string>

namespace lockstep {

// The driver's name of GPU `index`; empty if this build has no CUDA part.
std::string gpu_name(int index);

// What tells GPU `index` from all others, whatever index a process has for it; empty like gpu_name.
std::string gpu_id(int index);

}  // namespace lockstep
