// Checks a flag's text before CLI11 reads it. CLI11 would take "" as if no folder were given, and any number that is
// too large as the largest one. Each check returns the mistake in words, or "".
#pragma once

#include <charconv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>

namespace lockstep::cli {

inline std::string not_empty(const std::string& text) {
  return text.empty() ? "it is empty; leave the flag out for the default" : "";
}

// Checks for a whole number in decimal that fits a Number.
template <class Number>
std::string number_within(const std::string& text, int64_t least, int64_t most) {
  Number number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  if (error == std::errc::result_out_of_range) return text + " is too large";
  if (error != std::errc() || rest != end) {
    return text + " is not a whole number" + (std::is_unsigned_v<Number> ? " of at least 0" : "");
  }
  if (std::cmp_less(number, least)) return text + " is too small; it must be at least " + std::to_string(least);
  const bool bounded = most < std::numeric_limits<int64_t>::max();
  return bounded && std::cmp_greater(number, most) ? text + " is too large; it must be at most " + std::to_string(most)
                                                   : "";
}

template <class Number, Number least, Number most = std::numeric_limits<Number>::max()>
std::string number_between(const std::string& text) {
  constexpr int64_t any = std::numeric_limits<int64_t>::max();
  return number_within<Number>(text, least, std::in_range<int64_t>(most) ? static_cast<int64_t>(most) : any);
}

// Checks for a number that fits a float and is not negative.
inline std::string rate(const std::string& text) {
  double number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  if ((error != std::errc() && error != std::errc::result_out_of_range) || rest != end || std::isnan(number)) {
    return text + " is not a number";
  }
  if (number < 0) return text + " is too small; it must be at least 0";
  const bool fits = error == std::errc() && number <= std::numeric_limits<float>::max();
  return fits ? "" : text + " is too large; it must be at most 3.4e38, the largest float";
}

}  // namespace lockstep::cli
