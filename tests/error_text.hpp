// error_text(f): the text of the lockstep::Error that f throws, or a text that no expectation matches.
#pragma once

#include <lockstep/error.hpp>

#include <string>

template <class Function>
std::string error_text(Function&& function) {
  try {
    function();
  } catch (const lockstep::Error& error) {
    return error.what();
  }
  return "(no lockstep::Error was thrown)";
}
