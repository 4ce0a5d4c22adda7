// The text of the lockstep::Error that an action throws, for tests that say what it must name.
#pragma once

#include <lockstep/base/error.hpp>

#include <string>

namespace lockstep {

template <class Action>
std::string error_of(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "(no error)";
}

}  // namespace lockstep
