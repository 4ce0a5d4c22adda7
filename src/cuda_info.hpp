// What only the CUDA part of LibTorch can tell of a GPU. CMake takes cuda_info.cpp or no_cuda_info.cpp.
#pragma once

#include <string>

namespace lockstep {

// The driver's name of GPU `index`; empty if this build has no CUDA part.
std::string gpu_name(int index);

}  // namespace lockstep
