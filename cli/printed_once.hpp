// PrintedOnce: the errors that the processes of a `lockstep launch` have printed, so that a failure which all of them
// learn is printed once. A process that would fail again notes that here too, and the launcher does not start it in
// vain. The launcher makes the list and hands it on as an inherited file descriptor. A process without one, or whose
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
// another one's text. From here on it counts as printed.
std::string not_yet_printed(const std::string& text);

// This process fails, and would whenever it is started with the same words.
void note_would_fail_again();

}  // namespace lockstep::cli
