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

std::string gpu_address(int index) {
  const auto* const gpu = at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(index));
  return std::to_string(gpu->pciDomainID) + ":" + std::to_string(gpu->pciBusID) + ":" +
         std::to_string(gpu->pciDeviceID);
}

}  // namespace lockstep
