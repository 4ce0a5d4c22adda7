#include "cuda_info.hpp"

#include <ATen/cuda/CUDAContextLight.h>

namespace lockstep {

std::string gpu_name(int index) {
  return at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(index))->name;
}

}  // namespace lockstep
