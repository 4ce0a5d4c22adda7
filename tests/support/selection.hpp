// Chooses which tests of a program run: those of some files, each with a filter of its own.
#pragma once

#include <c10/util/StringUtil.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

// Matches as the patterns of --gtest_filter do: * stands for any characters, ? for one.
inline bool matches(std::string_view name, std::string_view pattern) {
  if (pattern.empty()) return name.empty();
  if (pattern[0] == '*') return matches(name, pattern.substr(1)) || (!name.empty() && matches(name.substr(1), pattern));
  return !name.empty() && (pattern[0] == '?' || pattern[0] == name[0]) && matches(name.substr(1), pattern.substr(1));
}

inline bool matches_any(std::string_view name, std::string_view patterns) {
  for (size_t begin = 0; begin < patterns.size();) {
    const size_t end = std::min(patterns.find(':', begin), patterns.size());
    if (matches(name, patterns.substr(begin, end - begin))) return true;
    begin = end + 1;
  }
  return false;
}

// A filter of --gtest_filter for the tests of one file.
struct Selection {
  std::string file, wanted = "*", unwanted;
  bool found = false;

  Selection(const std::string& file, const std::string& filter) : file(file) {
    const size_t minus = std::min(filter.find('-'), filter.size());
    if (minus > 0) wanted = filter.substr(0, minus);
    unwanted = filter.substr(std::min(minus + 1, filter.size()));
  }
  bool takes(const std::string& test) const { return matches_any(test, wanted) && !matches_any(test, unwanted); }
};

// Each line of this file names a file of tests, and after a | a filter for it.
inline std::vector<Selection> read_selections(const std::string& path) {
  std::vector<Selection> selections;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t bar = std::min(line.find('|'), line.size());
    selections.emplace_back(line.substr(0, bar), line.substr(std::min(bar + 1, line.size())));
  }
  return selections;
}

// Leaves what is selected. Returns what is wrong, if something is.
inline std::string leave_only(std::vector<Selection> selections) {
  std::string names;
  const auto& tests = *testing::UnitTest::GetInstance();
  for (int i = 0; i < tests.total_test_suite_count(); ++i) {
    const auto& suite = *tests.GetTestSuite(i);
    for (int test = 0; test < suite.total_test_count(); ++test) {
      const std::string_view file = suite.GetTestInfo(test)->file();
      if (file != suite.GetTestInfo(0)->file()) return c10::str(suite.name(), " is a suite of two files; rename one");
      for (auto& selection : selections) {
        const std::string name = std::string(suite.name()) + "." + suite.GetTestInfo(test)->name();
        if (!file.ends_with("/" + selection.file) || !selection.takes(name)) continue;
        selection.found = true;
        names += ":" + name;
      }
    }
  }
  for (const auto& selection : selections) {
    if (!selection.found) return "there are no such tests of " + selection.file + " in this program";
  }
  GTEST_FLAG_SET(filter, names.substr(std::min<size_t>(1, names.size())));
  return "";
}

}  // namespace lockstep
