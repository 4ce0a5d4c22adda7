// The text of the lockstep::Error that a call ends in, for tests of bad input.
#pragma once

#include <lockstep/error.hpp>

#include <string>

namespace lockstep {

template <typename Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace lockstep
