// The simulated device (docs/simulated-device.md), where it is loaded in front of this program.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "simulated/device/interface.h"

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

}  // namespace lockstep::simulated
