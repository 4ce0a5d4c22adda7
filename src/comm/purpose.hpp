// Purpose: what a thread's calls are for while it lives, as errors say it: "DataParallel's backward 3".
#pragma once

#include <string>
#include <utility>

namespace lockstep::comm {

// If all ranks make the call, they must all give it the same purpose, as the rest of the call. `text` outlives it.
class Purpose {
 public:
  explicit Purpose(const std::string& text) : before_(std::exchange(now(), &text)) {}
  ~Purpose() { now() = before_; }
  Purpose(const Purpose&) = delete;
  Purpose& operator=(const Purpose&) = delete;

  static std::string text() { return now() == nullptr ? "" : *now(); }

 private:
  static const std::string*& now() {
    static thread_local const std::string* text = nullptr;
    return text;
  }

  const std::string* const before_;
};

}  // namespace lockstep::comm
