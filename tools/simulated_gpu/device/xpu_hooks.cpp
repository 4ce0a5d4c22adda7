// What ATen asks of Intel's GPUs. LibTorch looks for a class named XPUHooks.
#include "hooks.hpp"

#include <ATen/detail/XPUHooksInterface.h>

namespace simulated {

struct XpuHooks final : AnyHooks<at::XPUHooksInterface> {
  XpuHooks() = default;
  explicit XpuHooks(at::XPUHooksArgs) {}  // as LibTorch 2.11 makes it
  bool hasXPU() const override { return true; }
  c10::DeviceIndex getNumGPUs() const override { return deviceCount(); }
};

}  // namespace simulated

namespace at {  // the registry is there
C10_REGISTER_CLASS(XPUHooksRegistry, XPUHooks, simulated::XpuHooks)
}
