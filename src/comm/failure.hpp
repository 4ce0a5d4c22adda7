// Failure: what ended a run on all of its ranks. It is the same everywhere, so the store keeps it as a text.
#pragma once

#include <lockstep/base/error.hpp>

#include <exception>
#include <string>
#include <utility>

namespace lockstep::comm {

// A run ended because one of its processes is gone. An elastic job goes on after it (ranks/elastic_job.hpp).
class ProcessDied : public Error {
 public:
  using Error::Error;
};

// A rank waited for another one longer than the timeout.
class TimedOut : public Error {
 public:
  using Error::Error;
};

struct Failure {
  enum class Kind {
    error,
    late,   // a rank waited longer than the timeout
    stop,   // a user asked for it; raise() throws Stopped
    death,  // a process ended without a word
  };

  Failure() = default;  // none: all is well
  Failure(std::string text, Kind kind = Kind::error) : text(std::move(text)), kind(kind) {}

  bool empty() const { return text.empty(); }
  [[noreturn]] void raise() const;  // throws Stopped, ProcessDied, TimedOut or Error

  std::string text;
  Kind kind = Kind::error;
};

// The failure of a rank that ended with this exception.
Failure failure_of(const std::exception_ptr& exception);

// The text by which the store keeps a failure. An error's own text is stored unchanged.
std::string to_stored(const Failure& failure);
Failure failure_from(const std::string& stored);

}  // namespace lockstep::comm
