// Output: a file descriptor that text goes to, usually the standard output.
//
// Nothing here throws. A reader that has gone away, or a full disk, is remembered. So a callback deep inside the
// library can go on printing, and the program decides at the end. A reader that does not read, as a pager or a terminal
// after Ctrl-S, holds up nothing: what it has no room for is kept, and goes out with the next text or in finish(). Not
// thread-safe.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

namespace lockstep::cli {

inline constexpr std::chrono::seconds kPatienceAfterStop{1};  // with who reads, once the user asked for an end

class Output {
 public:
  explicit Output(int fd);
  ~Output();  // waits for 10 s at most
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  // Writes what there is room for at once, unbuffered. Does nothing after a failure.
  void print(std::string_view text);

  // Waits until the reader has taken all, or is gone. false: it has not within `patience`.
  void finish();
  bool finish(std::chrono::milliseconds patience);
  void give_up() { kept_.clear(); }  // what the reader has not taken

  int fd() const { return fd_; }
  bool is_behind() const { return !kept_.empty(); }
  bool failed() const { return error_ != 0; }
  int error() const { return error_; }  // the errno of the first failure; EPIPE: the reader has gone away

 private:
  void write_until(std::chrono::steady_clock::time_point deadline);

  int fd_;
  int terminal_;  // the same one, as an open file of its own that never waits; -1: it is no terminal
  int error_ = 0;
  std::string kept_;  // for a reader that was slow
};

}  // namespace lockstep::cli
