// Failure: what ended a run on all of its ranks. It is the same everywhere, so the store keeps it as a text.
#pragma once

#include <lockstep/base/error.hpp>

#include <exception>
#include <string>
#include <utility>

namespace lockstep::comm {

struct Failure {
  Failure() = default;  // no failure: all is well
  Failure(std::string text, Error::Data data) : text(std::move(text)), data(std::move(data)) {}
  Failure(const Error& error) : Failure(error.what(), error.data()) {}

  bool empty() const { return text.empty(); }
  bool is(Error::Cause cause) const { return !empty() && data.cause == cause; }
  [[noreturn]] void raise() const;  // throws Stopped or Error

  std::string text;
  Error::Data data;
};

// The failure of a rank that ended with this exception.
Failure failure_of(const std::exception_ptr& exception);

// The text by which the store keeps a failure. A text that is no failure's, as a stranger may leave it, becomes one's
// text unchanged.
std::string to_stored(const Failure& failure);
Failure failure_from(const std::string& stored);

}  // namespace lockstep::comm
