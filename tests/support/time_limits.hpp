// Limits of time in tests: they tell an end that somebody noticed from one that a timeout brought.
#pragma once

#include <chrono>

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

}  // namespace lockstep
