// An action's error, for tests that compare an error's data: EXPECT_THAT(error_of(action), Fails(Error::file)).
// Texts are compared in whole/error_texts_test.cpp, whose head names the few other files.
#pragma once

#include <gmock/gmock.h>
#include <lockstep/base/error.hpp>

#include "support/error_data.hpp"

#include <exception>
#include <iomanip>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

// The text, "(no error)" if nothing was thrown; and the data of an Error of lockstep.
struct Caught : std::string {
  std::optional<Error::Data> data;
};

inline void PrintTo(const Caught& caught, std::ostream* out) {
  *out << std::quoted(static_cast<const std::string&>(caught));
}

// Catches a lockstep::Error; any other error is the test's own.
template <class Action>
Caught error_of(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    return {error.what(), error.data()};
  }
  return {"(no error)", std::nullopt};
}

// Catches any error, such as LibTorch's.
template <class Action>
std::string any_error_of(Action&& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "(no error)";
}

// Ranks and options that a test does not name may be any.
MATCHER_P(HasData, expected, (negation ? "is not: " : "is: ") + data_text(expected)) {
  if (!arg.data) return false;
  *result_listener << "which is: " << data_text(*arg.data);
  return arg.data->cause == expected.cause && (expected.ranks.empty() || arg.data->ranks == expected.ranks) &&
         (expected.options.empty() || arg.data->options == expected.options);
}

inline auto Fails(Error::Cause cause, std::vector<int> ranks = {}, std::vector<std::string> options = {}) {
  return HasData(Error::Data{cause, std::move(ranks), std::move(options)});
}

template <class... Keys>
auto Refused(Keys... keys) {
  return HasData(Error::Data{.options = {keys...}});
}

}  // namespace lockstep
