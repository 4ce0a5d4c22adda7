// AgreedParts: says that all ranks know all parts of the alltoalls that a thread posts while it lives.
#pragma once

#include <string>
#include <utility>

namespace lockstep::comm {

// `text` says what decides all parts of all ranks. It becomes part of the call: ranks with other texts make other
// calls, which errors show. So the ranks need not compare their parts, which between processes takes several calls of
// the store. `text` outlives it.
class AgreedParts {
 public:
  explicit AgreedParts(const std::string& text) : before_(std::exchange(now(), &text)) {}
  ~AgreedParts() { now() = before_; }
  AgreedParts(const AgreedParts&) = delete;
  AgreedParts& operator=(const AgreedParts&) = delete;

  static const std::string* text() { return now(); }  // null: they do not know them

 private:
  static const std::string*& now() {
    static thread_local const std::string* text = nullptr;
    return text;
  }

  const std::string* const before_;
};

}  // namespace lockstep::comm
