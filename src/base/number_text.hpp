// Writes numbers as text for settings, without losing a digit.
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

// The number with `digits` digits, as printf writes it under "%.3g" (general) or "%.3f" (fixed).
inline std::string number_text(double number, std::chars_format format, int digits) {
  std::array<char, 400> text{};  // 1e308 in full takes 309
  const auto end = std::to_chars(text.data(), text.data() + text.size(), number, format, digits).ptr;
  return {text.data(), end};
}

}  // namespace lockstep
