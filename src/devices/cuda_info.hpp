// Asks what only the CUDA part of LibTorch can say about a GPU. CMake takes cuda_info.cpp or no_cuda_info.cpp.
#pragma once

#include <string>

namespace lockstep {

// The driver's name of GPU `index`; empty if this build has no CUDA part.
std::string gpu_name(int index);

// The driver's name of GPU `index`, and its compute capability. Empty like gpu_name.
std::string gpu_kind(int index);

// An identity of GPU `index` that is the same in every process, whatever index it has there. Empty like gpu_name.
std::string gpu_id(int index);

}  // namespace lockstep
