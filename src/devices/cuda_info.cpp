#include "cuda_info.hpp"

#include <ATen/cuda/CUDAContextLight.h>

namespace lockstep {

std::string gpu_name(int index) {
  return at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(index))->name;
}

std::string gpu_kind(int index) {
  const auto* const gpu = at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(index));
  return std::string(gpu->name) + " " + std::to_string(gpu->major) + "." + std::to_string(gpu->minor);
}

std::string gpu_id(int index) {
  const cudaUUID_t id = at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(index))->uuid;
  return {id.bytes, sizeof id.bytes};
}

}  // namespace lockstep
