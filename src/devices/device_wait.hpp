// Waits for a GPU while the host watches the run. A GPU's work may wait for other ranks, which may have failed or
// stopped. LibTorch's own wait would then never end.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <chrono>
#include <functional>
#include <string>

namespace lockstep {

struct DeviceWait {
  std::string who;  // the waiter's name
  std::chrono::milliseconds timeout;
  std::function<void()> look;  // throws if the wait is in vain; wait_for calls it again and again, and once at the end
};

// Marks the end of the work that the current stream of `device`, a GPU, has so far.
c10::Event end_of_stream(const c10::Device& device);

// Waits for `end`. Throws Error after the timeout.
void wait_for(const c10::Event& end, const DeviceWait& wait);

}  // namespace lockstep
