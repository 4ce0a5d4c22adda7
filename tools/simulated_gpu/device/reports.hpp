// Reports of mistakes, and counts of what costs time. A program whose reports nobody took ends with kReportsExitCode.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>

namespace simulated {

inline constexpr int kReportsExitCode = 70;

void report(const std::string& mistake);

struct Counts {
  std::atomic<int64_t> launches = 0, high_priority_launches = 0, host_waits = 0, late_waits = 0;
  std::array<std::atomic<int64_t>, 128> uses{};   // uses by device
  std::atomic<bool> warns_of_host_waits = false;  // LibTorch can be told to warn
};

Counts& counts();

}  // namespace simulated
