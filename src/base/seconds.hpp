// Writes a duration as the texts of errors give it.
#pragma once

#include <chrono>
#include <string>

#include "base/classic.hpp"

namespace lockstep::comm {

inline std::string seconds(std::chrono::milliseconds time) {
  return classic_text(static_cast<double>(time.count()) / 1000, " s");
}

}  // namespace lockstep::comm
