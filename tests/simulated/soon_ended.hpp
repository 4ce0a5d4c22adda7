// Runs that fail, in which NCCL would wait for what does not come.
#pragma once

#include <gtest/gtest.h>
#include <lockstep/ranks/rank.hpp>

#include "support/error_of.hpp"

#include <chrono>
#include <functional>
#include <string>

namespace lockstep {

// The error of a run, which must end soon all the same.
inline Caught soon_ended(const Devices& devices, const std::function<void(Rank&)>& body,
                         std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  const auto start = std::chrono::steady_clock::now();
  const auto error = error_of([&] { run(devices, body, {.timeout = timeout}); });
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(8)) << error;
  return error;
}

}  // namespace lockstep
