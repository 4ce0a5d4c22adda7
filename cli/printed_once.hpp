// What the processes of a `lockstep launch` have said on the standard error, so that a failure which all of them learn
// is said once; and to the launcher, so that it does not start in vain what would fail again. The launcher makes the
// list and hands it on as an inherited file descriptor; a process without one, or whose descriptor was closed on the
// way, says everything.
#pragma once

#include <string>

namespace lockstep::cli {

class PrintedOnce {
 public:
  // For the launcher. Throws Error.
  PrintedOnce();
  ~PrintedOnce();
  PrintedOnce(const PrintedOnce&) = delete;
  PrintedOnce& operator=(const PrintedOnce&) = delete;

  std::string variable() const;             // "NAME=value", for the processes' environment
  void add(const std::string& text) const;  // said by the launcher itself
  bool would_fail_again() const;            // a process says so

 private:
  int fd_;
};

// The part of `text` that no other process of this launch has said: all of it, what follows "; " after what another one
// said, or nothing. From here on it counts as said.
std::string not_yet_printed(const std::string& text);

// This process fails, and would whenever it is started with the same words.
void say_would_fail_again();

}  // namespace lockstep::cli
