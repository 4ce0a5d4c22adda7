// Device: a piece of address space and its streams. Which device and streams are current is each host thread's own.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "stream.hpp"

namespace simulated {

inline constexpr auto kType = c10::DeviceType::SIMULATED_TYPE;  // one whose libraries the program lacks
inline constexpr size_t kBytes = size_t{1} << 30;               // bytes of a device

// Nobody may touch a device's addresses. Its streams use what lies kBytes further, as the same memory.
inline char* on_stream(char* address) {
  return address + kBytes;
}

class Device {
 public:
  static constexpr int64_t kBranch = -1;  // the id of streams of graphs, which only those know

  explicit Device(int index);

  char* memory() const { return memory_; }
  Stream& stream(int64_t id) const { return *streams_.at(static_cast<size_t>(id)); }
  const std::vector<std::unique_ptr<Stream>>& streams() const { return streams_; }
  int64_t next_of_pool(bool high_priority);  // a stream's id
  static bool has_high_priority(const Stream& stream) { return stream.id > kPool; }

 private:
  static constexpr int kPool = 32;  // streams of each priority

  char* memory_;
  std::vector<std::unique_ptr<Stream>> streams_;  // 0: the default one; then the pools of low and of high priority
  std::atomic<unsigned> taken_low_ = 0, taken_high_ = 0;
};

Device& device(int index);  // call it only to use the device: CUDA makes a context there, of hundreds of MB

int& current_device();
int64_t& current_stream_id(int device);
Stream& current_stream(int device);
Stream& stream_of(const c10::Stream& stream);

}  // namespace simulated
