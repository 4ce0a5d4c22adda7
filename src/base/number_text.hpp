// Numbers as text for settings, which must not lose a digit.
#pragma once

#include <array>
#include <charconv>
#include <string>

namespace lockstep {

// The shortest text that is read back as exactly this number: "0.2", "1e-05"; "nan", "inf".
inline std::string number_text(double number) {
  std::array<char, 32> digits{};  // the longest takes 24
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr;
  return {digits.data(), end};
}

}  // namespace lockstep
