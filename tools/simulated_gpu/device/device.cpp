#include "device.hpp"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include "reports.hpp"
#include "settings.hpp"

namespace simulated {
namespace {

std::vector<std::unique_ptr<Device>> all_devices() {
  std::vector<std::unique_ptr<Device>> devices;
  for (int index = 0; index < settings().devices; ++index) devices.push_back(std::make_unique<Device>(index));
  return devices;
}

}  // namespace

Device::Device(int index) {
  void* const memory = mmap(nullptr, 2 * kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(memory != MAP_FAILED, "no addresses for a simulated device");
  memory_ = static_cast<char*>(memory);
  TORCH_CHECK(mprotect(on_stream(memory_), kBytes, PROT_READ | PROT_WRITE) == 0, "no memory for a simulated device");
  for (int id = 0; id <= 2 * kPool; ++id) streams_.push_back(std::make_unique<Stream>(index, id));
}

int64_t Device::next_of_pool(bool high_priority) {
  const unsigned number = (high_priority ? taken_high_ : taken_low_)++ % kPool;
  return 1 + static_cast<int64_t>(number) + (high_priority ? kPool : 0);
}

Device& device(int index) {
  static auto* const devices = new std::vector<std::unique_ptr<Device>>(all_devices());
  ++counts().uses.at(static_cast<size_t>(index));
  return *devices->at(static_cast<size_t>(index));
}

int& current_device() {
  thread_local int index = 0;
  return index;
}

int64_t& current_stream_id(int device) {
  thread_local std::vector<int64_t> ids(static_cast<size_t>(settings().devices), 0);
  return ids.at(static_cast<size_t>(device));
}

Stream& current_stream(int index) {
  return device(index).stream(current_stream_id(index));
}

Stream& stream_of(const c10::Stream& stream) {
  return device(stream.device_index()).stream(stream.id());
}

}  // namespace simulated
