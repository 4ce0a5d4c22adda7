// The names of several ranks in an error's text.
#pragma once

#include <string>
#include <vector>

namespace lockstep {

// Joins the names of the ranks with these numbers, as "rank 1 (cpu) and rank 3 (cpu)".
template <class Number>
std::string joined_names(const std::vector<Number>& ranks, const std::vector<std::string>& names) {
  std::string text;
  for (const Number rank : ranks) text += (text.empty() ? "" : " and ") + names[static_cast<size_t>(rank)];
  return text;
}

}  // namespace lockstep
