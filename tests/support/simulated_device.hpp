// The simulated device (docs/simulated-device.md), where it is loaded in front of this program.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <dlfcn.h>

#include <cstdint>
#include <functional>
#include <future>
#include <string>
#include <utility>
#include <vector>

#include "simulated_gpu/device/interface.h"

namespace lockstep::simulated {

inline bool is_there() {
  return dlsym(RTLD_DEFAULT, "simulated_device_launches") != nullptr;
}

// The function of the device's interface that has this name. Call the following only where the device is there.
template <class Function>
Function* function(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

inline int64_t launches() {
  return function<decltype(simulated_device_launches)>("simulated_device_launches")();
}

inline int64_t high_priority_launches() {
  return function<decltype(simulated_device_high_priority_launches)>("simulated_device_high_priority_launches")();
}

inline int64_t uses_of(int device) {
  return function<decltype(simulated_device_uses)>("simulated_device_uses")(device);
}

inline int64_t host_waits() {
  return function<decltype(simulated_device_host_waits)>("simulated_device_host_waits")();
}

inline int64_t late_waits() {
  return function<decltype(simulated_device_late_waits)>("simulated_device_late_waits")();
}

// The mistakes since the last call. A test fails if one is left at its end.
inline std::vector<std::string> take_reports() {
  auto* const take = function<decltype(simulated_device_take_report)>("simulated_device_take_report");
  std::vector<std::string> texts;
  while (const char* const text = take()) texts.emplace_back(text);
  return texts;
}

// Queues a task on a stream. Nothing is known of what it reads and writes.
inline void queue(int device, int64_t stream, std::function<void()> task) {
  function<decltype(simulated_device_queue)>("simulated_device_queue")(
      device, stream,
      [](void* argument) {
        auto* const task = static_cast<std::function<void()>*>(argument);
        (*task)();
        delete task;
      },
      new std::function<void()>(std::move(task)));
}

// An event that is over when the stream has done what it was given so far.
inline c10::Event marked(const c10::Stream& stream) {
  c10::Event event(stream.device_type());
  event.record(stream);
  return event;
}

// Holds up a stream until it is opened, or destroyed.
class Gate {
 public:
  Gate(int device, int64_t stream) {
    queue(device, stream, [opened = opened_.get_future().share()] { opened.wait(); });
  }
  explicit Gate(const c10::Stream& stream) : Gate(stream.device_index(), stream.id()) {}
  ~Gate() { open(); }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  void open() {
    if (!std::exchange(is_open_, true)) opened_.set_value();
  }

 private:
  std::promise<void> opened_;
  bool is_open_ = false;
};

}  // namespace lockstep::simulated
