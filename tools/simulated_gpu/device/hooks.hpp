// Answers the questions that ATen asks about every type of device.
#pragma once

#include <ATen/core/Generator.h>

#include <utility>

#include "generator.hpp"
#include "guard.hpp"
#include "pinned.hpp"
#include "settings.hpp"

namespace simulated {

template <class Interface>
struct AnyHooks : Interface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return Guard().deviceCount(); }
  c10::DeviceIndex current_device() const override { return getCurrentDevice(); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(simulated::current_device());
  }
  void setCurrentDevice(c10::DeviceIndex index) const override { simulated::current_device() = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return static_cast<c10::DeviceIndex>(std::exchange(simulated::current_device(), index));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  void deviceSynchronize(c10::DeviceIndex index) const override { Guard().synchronizeDevice(index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index_or_current(index));
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index_or_current(index));
  }

 private:
  static int index_or_current(c10::DeviceIndex index) { return index < 0 ? simulated::current_device() : index; }
};

}  // namespace simulated
