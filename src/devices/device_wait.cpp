#include "device_wait.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <lockstep/base/error.hpp>

#include <thread>

#include "base/seconds.hpp"

namespace lockstep {
namespace {

// A wait of a training step is mostly shorter than the first, and would be longer by the second.
constexpr std::chrono::milliseconds kWithoutSleep{2};
constexpr std::chrono::microseconds kSleep{100};

}  // namespace

c10::Event end_of_stream(const c10::Device& device) {
  c10::Event event(device.type());
  event.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return event;
}

void wait_for(const c10::Event& end, const DeviceWait& wait) {
  const auto start = std::chrono::steady_clock::now();
  while (!end.query()) {
    const auto waited = std::chrono::steady_clock::now() - start;
    if (waited < kWithoutSleep) {
      std::this_thread::yield();
      continue;
    }
    wait.look();
    if (waited >= wait.timeout) {
      throw Error(wait.who + ": waited " + comm::seconds(wait.timeout) +
                  " for its GPU to do what it was given. That may wait for a rank which has stopped: all ranks must " +
                  "make the same steps. If that is no error, raise the timeout (RunOptions::timeout)");
    }
    std::this_thread::sleep_for(kSleep);
  }
  wait.look();
}

}  // namespace lockstep
