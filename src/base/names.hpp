// Finds enums' names and values: one table of pairs answers both ways.
//
//   constexpr std::array names{std::pair{Colour::red, "red"}, std::pair{Colour::green, "green"}};
#pragma once

#include <lockstep/base/error.hpp>

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>

namespace lockstep {

// Gives the name of `value`. Give a value that is in the table.
template <class Names, class Value>
std::string_view name_in(const Names& names, Value value) {
  return std::find_if(names.begin(), names.end(), [&](const auto& item) { return item.first == value; })->second;
}

// Gives the value with that name. Throws Error, which begins with `what` ("the precision") and lists all names.
template <class Names>
auto value_in(const Names& names, std::string_view name, const std::string& what) {
  std::string known;
  for (size_t i = 0; i < names.size(); ++i) {
    if (name == names[i].second) return names[i].first;
    known += (i == 0 ? "" : i + 1 == names.size() ? " or " : ", ") + std::string(names[i].second);
  }
  throw Error(what + " is \"" + std::string(name) + "\"; it must be " + known);
}

}  // namespace lockstep
