// Answers c10's questions about a device: which is current, its streams, events and waits.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/version.h>

#include "device.hpp"

namespace simulated {

c10::Device device_at(int index);

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override;
  c10::Device getDevice() const override;
  void setDevice(c10::Device device) const override;
  void uncheckedSetDevice(c10::Device device) const noexcept override;
  c10::DeviceIndex deviceCount() const noexcept override;

  c10::Stream getStream(c10::Device device) const override;
  c10::Stream getDefaultStream(c10::Device device) const override;
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override;
  c10::Stream exchangeStream(c10::Stream stream) const override;
  bool queryStream(const c10::Stream& stream) const override;
  void synchronizeStream(const c10::Stream& stream) const override;
#if TORCH_VERSION_MINOR >= 15  // older ones do not ask
  bool isStreamCapturing(const c10::Stream& stream) const override;
#endif
  void synchronizeDevice(c10::DeviceIndex index) const override;
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override;

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex index, c10::EventFlag flag) const override;
  void block(void* event, const c10::Stream& stream) const override;
  bool queryEvent(void* event) const override;
  void synchronizeEvent(void* event) const override;
  double elapsedTime(void* from, void* to, c10::DeviceIndex index) const override;
  void destroyEvent(void* event, c10::DeviceIndex index) const noexcept override;
};

}  // namespace simulated
