// Purpose: says in errors what a thread's calls are for while it lives: "DataParallel's backward 3".
#pragma once

#include <string>
#include <utility>

namespace lockstep::comm {

// A ThreadText goes with a thread's calls while it lives. Each `Kind` has a text of its own.
template <class Kind>
class ThreadText {
 public:
  explicit ThreadText(const std::string& text) : before_(std::exchange(now(), &text)) {}  // keep `text` longer
  ~ThreadText() { now() = before_; }
  ThreadText(const ThreadText&) = delete;
  ThreadText& operator=(const ThreadText&) = delete;

  static const std::string* current() { return now(); }  // gives null if there is none

 private:
  static const std::string*& now() {
    static thread_local const std::string* text = nullptr;
    return text;
  }

  const std::string* const before_;
};

// Give a collective call the same purpose on all ranks: it is compared with the rest of the call.
class Purpose : public ThreadText<Purpose> {
 public:
  using ThreadText::ThreadText;

  static std::string text() { return current() == nullptr ? "" : *current(); }
};

}  // namespace lockstep::comm
