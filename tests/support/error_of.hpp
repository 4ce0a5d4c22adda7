// The text of the error that an action throws, for tests that say what it must name.
#pragma once

#include <lockstep/base/error.hpp>

#include <exception>
#include <string>

namespace lockstep {

// Of a lockstep::Error; any other error is the test's own.
template <class Action>
std::string error_of(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "(no error)";
}

// Of any, such as LibTorch's.
template <class Action>
std::string any_error_of(Action&& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "(no error)";
}

}  // namespace lockstep
