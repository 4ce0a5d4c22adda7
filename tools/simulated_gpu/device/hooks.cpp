// Answers ATen's questions about CUDA. LibTorch looks for a class named CUDAHooks, which is in its CUDA libraries, or
// here.
#include "hooks.hpp"

#include <ATen/detail/CUDAHooksInterface.h>

#include "memory.hpp"

namespace simulated {

struct Hooks final : AnyHooks<at::CUDAHooksInterface> {
  explicit Hooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return deviceCount(); }
  at::Allocator* getCUDADeviceAllocator() const override { return &allocator(); }
};

}  // namespace simulated

namespace at {  // the registry is there
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, simulated::Hooks)
}
