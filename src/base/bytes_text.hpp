// Writes numbers of bytes for people.
#pragma once

#include <array>
#include <string>

#include "base/number_text.hpp"

namespace lockstep {

// "12 B", "1.5 kB", "244 MB": three digits, decimal prefixes.
inline std::string bytes_text(double bytes) {
  static constexpr std::array units = {"B", "kB", "MB", "GB", "TB", "PB"};
  size_t unit = 0;
  while (bytes >= 999.5 && unit + 1 < units.size()) {
    bytes /= 1000;
    ++unit;
  }
  return number_text(bytes, std::chars_format::general, 3) + " " + units[unit];
}

}  // namespace lockstep
