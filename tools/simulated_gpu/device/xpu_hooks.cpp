// Answers ATen's questions about Intel's GPUs. LibTorch looks for a class named XPUHooks.
#include "hooks.hpp"

#include <ATen/detail/XPUHooksInterface.h>

namespace simulated {

struct XpuHooks final : AnyHooks<at::XPUHooksInterface> {
  XpuHooks() = default;
  explicit XpuHooks(at::XPUHooksArgs) {}  // LibTorch 2.11 calls this one
  bool hasXPU() const override { return true; }
  c10::DeviceIndex getNumGPUs() const override { return deviceCount(); }
};

}  // namespace simulated

namespace at {  // the registry is there
C10_REGISTER_CLASS(XPUHooksRegistry, XPUHooks, simulated::XpuHooks)
}
