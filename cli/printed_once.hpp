// PrintedOnce: the errors that the processes of a `lockstep launch` have printed. So a failure that all of them learn
// is printed once. The launcher makes the list, and hands it on as an inherited file descriptor. A process that would
// fail again says so here too; the launcher then does not start it in vain. A process without a list, or whose
// descriptor was closed on the way, prints everything.
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
  void add(const std::string& text) const;  // the launcher itself has printed it
  bool would_fail_again() const;            // a process has noted so

 private:
  int fd_;
};

// The part of `text` that no other process of this launch has printed: all of it, nothing, or what follows "; " after
// another process's text. From now on it counts as printed.
std::string not_yet_printed(const std::string& text);

// Notes that this process fails, and would fail again if it was started with the same words.
void note_would_fail_again();

}  // namespace lockstep::cli
