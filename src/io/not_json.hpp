// Says in our own words what is wrong with a text that is not JSON. The JSON library's texts name its exceptions.
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <string>
#include <string_view>

namespace lockstep::io {

// Says "it goes wrong at line 2, column 7". Give as `error` what nlohmann::json::parse(text) threw.
inline std::string where_not_json(std::string_view text, const nlohmann::json::exception& error) {
  const auto* const wrong = dynamic_cast<const nlohmann::json::parse_error*>(&error);
  if (wrong == nullptr) return "a number in it is too large";
  const std::string_view before = text.substr(0, std::max<size_t>(wrong->byte, 1) - 1);
  const size_t line_begin = before.rfind('\n') + 1;  // 0 if there is none
  return "it goes wrong at line " + std::to_string(1 + std::count(before.begin(), before.end(), '\n')) + ", column " +
         std::to_string(before.size() - line_begin + 1);
}

}  // namespace lockstep::io
