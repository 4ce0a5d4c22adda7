// A Failure says what ended a run. All ranks get the same failure, so the store keeps it as a text.
#pragma once

#include <lockstep/base/error.hpp>

#include <exception>
#include <string>
#include <utility>

namespace lockstep::comm {

struct Failure {
  Failure() = default;  // makes no failure: all is well
  Failure(std::string text, Error::Data data) : text(std::move(text)), data(std::move(data)) {}
  Failure(const Error& error) : Failure(error.what(), error.data()) {}

  bool empty() const { return text.empty(); }
  bool is(Error::Cause cause) const { return !empty() && data.cause == cause; }
  [[noreturn]] void raise() const;  // throws Stopped or Error

  std::string text;
  Error::Data data;
};

// Gives the failure of a rank that ended with this exception.
Failure failure_of(const std::exception_ptr& exception);

// Gives the text by which the store keeps a failure. A text of a stranger, which is no failure's, becomes a failure's
// text unchanged.
std::string to_stored(const Failure& failure);
Failure failure_from(const std::string& stored);

}  // namespace lockstep::comm
