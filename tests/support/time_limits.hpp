// Limits of time in tests, and waits within one. They tell an end that somebody noticed from one that a timeout
// brought.
#pragma once

#include <chrono>
#include <thread>

namespace lockstep {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)  // GCC
inline constexpr int kSlowdown = 3;
#elif defined(__has_feature)  // clang
inline constexpr int kSlowdown = __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) ? 3 : 1;
#else
inline constexpr int kSlowdown = 1;
#endif

// A second or two of work and of noticing, and what a dozen processes need to start on a loaded machine.
inline constexpr std::chrono::seconds kBeforeTimeouts{20 * kSlowdown};

// false: so long has passed without.
template <class Condition>
bool comes_true(const Condition& condition, std::chrono::seconds limit = std::chrono::seconds(30)) {
  const auto deadline = std::chrono::steady_clock::now() + kSlowdown * limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

}  // namespace lockstep
