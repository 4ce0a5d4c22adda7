// lockstep::Error is the one exception type of the library. It carries a cause, and the ranks and options at fault, so
// that nobody has to search the text: catch an Error and compare cause(). Cause, ranks and options are the same on
// every rank and in every process of a run. Any thread may read an Error.
//
// Its text names, as far as known, the rank, the device, the operation and what to do. When a rank fails for another
// reason (a c10::Error of LibTorch, a std::bad_alloc), run() rethrows an Error with the original exception nested in it
// (std::rethrow_if_nested): of user_code, or of machine.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

class Error : public std::runtime_error {
 public:
  // A plain enumeration: GCC 12 cannot compile the name Error::file of a scoped one in a template.
  enum Cause {
    refused,     // a call, an argument or an option that lockstep does not take
    file,        // a file or a folder that is missing, damaged, foreign or taken, or cannot be written
    machine,     // memory, a GPU, a network or another program of this machine failed
    user_code,   // a body, a criterion, a callback or another function of the caller's threw
    difference,  // ranks called or computed different things
    not_finite,  // a loss or a gradient is not a number, or infinite
    death,       // a process of the run ended without a word
    late,        // a rank waited for another one longer than the timeout
    stopped,     // a user asked for it
  };
  struct Data {
    Cause cause = Cause::refused;
    std::vector<int> ranks = {};            // the ranks at fault, ascending; empty: not known, or all
    std::vector<std::string> options = {};  // keys of the options that do not fit, as in config.json or a Task
  };

  explicit Error(const std::string& text) : Error(text, Data()) {}
  Error(const std::string& text, Data data)
      : std::runtime_error(text), data_(std::make_shared<const Data>(std::move(data))) {}

  const Data& data() const { return *data_; }
  Cause cause() const { return data_->cause; }
  const std::vector<int>& ranks() const { return data_->ranks; }
  const std::vector<std::string>& options() const { return data_->options; }

 private:
  std::shared_ptr<const Data> data_;  // shared, since a copy of an exception must not throw
};

// Ends a run because its user asked for the end, in this process or in another one of the run.
class Stopped : public Error {
 public:
  explicit Stopped(const std::string& text) : Error(text, {.cause = Cause::stopped}) {}
};

}  // namespace lockstep
