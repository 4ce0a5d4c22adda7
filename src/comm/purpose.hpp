// Texts go with a thread's calls: a Purpose, and AgreedParts.
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
  ThreadText& operator=(ThreadText&&) = delete;

  static const std::string* current() { return now(); }  // gives null if there is none

 private:
  static const std::string*& now() {
    static thread_local const std::string* text = nullptr;
    return text;
  }

  const std::string* const before_;
};

// Says in errors what the calls are for: "DataParallel's backward 3". Give a collective call the same purpose on all
// ranks: it is compared with the rest of the call.
class Purpose : public ThreadText<Purpose> {
 public:
  using ThreadText::ThreadText;

  static std::string text() { return current() == nullptr ? "" : *current(); }
};

// While one lives, all ranks know all parts of the alltoalls and of the averages in a tree that its thread posts. The
// text names what decides all ranks' parts. It is compared with the rest of the call, so ranks with different texts get
// an Error. Therefore ranks need not compare the parts, which between processes takes several calls of the store.
class AgreedParts : public ThreadText<AgreedParts> {
 public:
  using ThreadText::ThreadText;
};

}  // namespace lockstep::comm
