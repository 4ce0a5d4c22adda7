// The words for an error's data: in failures of tests, and in what the program of the process tests prints.
#pragma once

#include <lockstep/base/error.hpp>

#include <string>

namespace lockstep {

inline std::string data_text(const Error::Data& data) {
  static const char* const causes[] = {"refused",    "file",  "machine", "user_code", "difference",
                                       "not_finite", "death", "late",    "stopped"};
  std::string text = causes[static_cast<size_t>(data.cause)];
  for (const int rank : data.ranks) text += " rank " + std::to_string(rank);
  for (const auto& option : data.options) text += " " + option;
  return text;
}

}  // namespace lockstep
