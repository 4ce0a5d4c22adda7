// Output: a file descriptor that text goes to, usually the standard output.
//
// Nothing here throws. A reader that has gone away, or a full disk, is remembered. So a callback deep inside the
// library can go on printing, and the program decides at the end. Not thread-safe.
#pragma once

#include <string_view>

namespace lockstep::cli {

class Output {
 public:
  explicit Output(int fd) : fd_(fd) {}

  // Writes all of `text` at once, unbuffered. Does nothing after a failure.
  void print(std::string_view text);

  int fd() const { return fd_; }
  bool failed() const { return error_ != 0; }
  int error() const { return error_; }  // the errno of the first failure; EPIPE: the reader has gone away

 private:
  int fd_;
  int error_ = 0;
};

}  // namespace lockstep::cli
