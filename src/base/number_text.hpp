// Writes numbers as text: for settings without the loss of a digit, and for people.
#pragma once

#include <array>
#include <charconv>
#include <cstdint>
#include <string>

namespace lockstep {

// Gives the shortest text that is read back as exactly this number: "0.2", "1e-05"; "nan", "inf".
inline std::string number_text(double number) {
  std::array<char, 32> digits{};  // the longest takes 24
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr;
  return {digits.data(), end};
}

// Writes the number with `digits` digits, as printf does under "%.3g" (general) or "%.3f" (fixed).
inline std::string number_text(double number, std::chars_format format, int digits) {
  std::array<char, 400> text{};  // 1e308 in full takes 309
  const auto end = std::to_chars(text.data(), text.data() + text.size(), number, format, digits).ptr;
  return {text.data(), end};
}

// Gives the number's last `digits` hexadecimal digits: "0a".
inline std::string hex_text(uint64_t number, int digits) {
  std::string text;
  for (int i = digits; i-- > 0;) text += "0123456789abcdef"[(number >> (4 * i)) & 15];
  return text;
}

// Writes three digits with decimal prefixes: "12 B", "1.5 kB", "244 MB".
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
