// What ATen asks of CUDA. LibTorch looks for a class named CUDAHooks, which is in its CUDA libraries, or here.
#include <ATen/detail/CUDAHooksInterface.h>

#include <utility>

#include "generator.hpp"
#include "guard.hpp"
#include "memory.hpp"
#include "pinned.hpp"
#include "settings.hpp"

namespace simulated {
namespace {

c10::DeviceIndex count() {
  return static_cast<c10::DeviceIndex>(settings().devices);
}

int index_or_current(c10::DeviceIndex index) {
  return index < 0 ? simulated::current_device() : index;
}

}  // namespace

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return count(); }
  c10::DeviceIndex deviceCount() const override { return count(); }
  c10::DeviceIndex current_device() const override { return getCurrentDevice(); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(simulated::current_device());
  }
  void setCurrentDevice(c10::DeviceIndex index) const override { simulated::current_device() = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return static_cast<c10::DeviceIndex>(std::exchange(simulated::current_device(), index));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  at::Allocator* getCUDADeviceAllocator() const override { return &allocator(); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  void deviceSynchronize(c10::DeviceIndex index) const override { Guard().synchronizeDevice(index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index_or_current(index));
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index_or_current(index));
  }
};

}  // namespace simulated

namespace at {  // the registry is there
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, simulated::Hooks)
}
