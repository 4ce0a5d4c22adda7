// ThreadText: a text that goes with a thread's calls while it lives. Each `Kind` has a text of its own.
#pragma once

#include <string>
#include <utility>

namespace lockstep::comm {

template <class Kind>
class ThreadText {
 public:
  explicit ThreadText(const std::string& text) : before_(std::exchange(now(), &text)) {}  // keep `text` longer
  ~ThreadText() { now() = before_; }
  ThreadText(const ThreadText&) = delete;
  ThreadText& operator=(const ThreadText&) = delete;

  static const std::string* current() { return now(); }  // null: there is none

 private:
  static const std::string*& now() {
    static thread_local const std::string* text = nullptr;
    return text;
  }

  const std::string* const before_;
};

}  // namespace lockstep::comm
