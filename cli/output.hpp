// Output: a file descriptor that text goes to, usually the standard output.
//
// Nothing here throws. Output notes that a reader has gone away, or that a disk is full. So a callback deep inside the
// library can go on printing, and the program decides at the end. A slow reader, such as a pager or a terminal after
// Ctrl-S, holds up nothing. Text without room is kept, and goes out with the next text or in finish(). Use it from one
// thread.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

namespace lockstep::cli {

inline constexpr std::chrono::seconds kPatienceAfterStop{1};  // patience with a slow reader after a stop

class Output {
 public:
  explicit Output(int fd);
  ~Output();  // waits for at most 10 s
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  // Writes at once, unbuffered, as much as there is room for. Does nothing after a failure.
  void print(std::string_view text);

  // Waits until the reader has taken all, or is gone. Gives false if the reader has not taken all within `patience`.
  void finish();
  bool finish(std::chrono::milliseconds patience);
  void give_up() { kept_.clear(); }  // drops what the reader has not taken

  int fd() const { return fd_; }
  bool is_behind() const { return !kept_.empty(); }
  bool failed() const { return error_ != 0; }
  int error() const { return error_; }  // the errno of the first failure; EPIPE: the reader has gone away

 private:
  void write_until(std::chrono::steady_clock::time_point deadline);

  int fd_;
  int terminal_;  // the same terminal, as an open file of its own that never waits; -1: it is no terminal
  int error_ = 0;
  std::string kept_;  // text that a slow reader has not taken
};

}  // namespace lockstep::cli
