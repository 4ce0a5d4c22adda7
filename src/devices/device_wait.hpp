// Waits for a GPU, in which the host looks around. What a GPU does may wait for other ranks, which may have failed or
// stopped. LibTorch's own wait would not end then.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <chrono>
#include <functional>
#include <string>

namespace lockstep {

struct DeviceWait {
  std::string who;  // waits
  std::chrono::milliseconds timeout;
  std::function<void()> look;  // throws if it is in vain; called again and again, and once when all is done
};

// The end of what the current stream of `device`, a GPU, has been given so far.
c10::Event end_of_stream(const c10::Device& device);

// Throws Error after the timeout.
void wait_for(const c10::Event& end, const DeviceWait& wait);

}  // namespace lockstep
