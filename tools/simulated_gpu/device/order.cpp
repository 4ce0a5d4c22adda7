#include "order.hpp"

#include <algorithm>

namespace simulated {

std::mutex& order() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

Clock& host_clock() {
  static auto* const clock = new Clock;
  return *clock;
}

void join(Clock& clock, const Clock& other) {
  for (const auto& [stream, tick] : other) clock[stream] = std::max(clock[stream], tick);
}

}  // namespace simulated
