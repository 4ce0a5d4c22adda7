// A duration as the texts of errors give it.
#pragma once

#include <c10/util/StringUtil.h>

#include <chrono>
#include <string>

namespace lockstep::comm {

inline std::string seconds(std::chrono::milliseconds time) {
  return c10::str(static_cast<double>(time.count()) / 1000, " s");
}

}  // namespace lockstep::comm
