#include "device_wait.hpp"

#include <lockstep/base/error.hpp>

#include <thread>

#include "base/seconds.hpp"
#include "device_streams.hpp"

namespace lockstep {
namespace {

// Most waits of a step take less than kWithoutSleep. A sleep would add kSleep to each.
constexpr std::chrono::milliseconds kWithoutSleep{2};
constexpr std::chrono::microseconds kSleep{100};

}  // namespace

c10::Event end_of_stream(const c10::Device& device) {
  c10::Event event(device.type());
  event.record(current_stream(device));
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
      throw Error(
          wait.who + ": waited " + comm::seconds(wait.timeout) +
              " for its GPU to do what it was given. That may wait for a rank which has stopped: all ranks must " +
              "make the same steps. If that is no error, raise the timeout (RunOptions::timeout)",
          {Error::late});
    }
    std::this_thread::sleep_for(kSleep);
  }
  wait.look();
}

}  // namespace lockstep
