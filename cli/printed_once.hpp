// PrintedOnce: a list of the errors that the processes of a `lockstep launch` have printed, so that a failure of all of
// them is printed once. The launcher makes the list, and passes it on as an inherited file descriptor. A process that
// would fail again notes that here too, and the launcher does not start it in vain. A process without a list, or whose
// descriptor was closed on the way, prints everything.
#pragma once

#include <string>

namespace lockstep::cli {

class PrintedOnce {
 public:
  // Use this in the launcher. Throws Error.
  PrintedOnce();
  ~PrintedOnce();
  PrintedOnce(const PrintedOnce&) = delete;
  PrintedOnce& operator=(const PrintedOnce&) = delete;

  std::string variable() const;             // "NAME=value", for the processes' environment
  void add(const std::string& text) const;  // notes that the launcher itself has printed it
  bool would_fail_again() const;            // gives whether a process has noted so

 private:
  int fd_;
};

// The words of `text` that no other process of this launch has printed: all, nothing, or those that follow "; " after
// another process's text. From now on they count as printed.
std::string not_yet_printed(const std::string& text);

// Notes that this process fails, and would fail again if it were started with the same words.
void note_would_fail_again();

}  // namespace lockstep::cli
