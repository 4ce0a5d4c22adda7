#include "output.hpp"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <csignal>
#include <string>
#include <thread>

#include "base/signals.hpp"

namespace lockstep::cli {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// Tells whether a write of up to PIPE_BUF bytes would not wait. The write need not succeed: the reader may be gone.
bool takes_more(int fd, Clock::time_point deadline) {
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd polled{fd, POLLOUT, 0};
    const int ready = poll(&polled, 1, static_cast<int>(std::clamp<int64_t>(left, 0, 1000)));
    if (ready > 0) return true;
    if (left <= 0) return false;
  }
}

// poll() says that a terminal has room if there is room for a byte, and a write waits for the rest. O_NONBLOCK belongs
// to the open file, which other programs share, so the terminal is opened anew. Gives -1 if this fails.
int reopened_terminal(int fd) {
  if (isatty(fd) == 0) return -1;
  return open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
}

// Gives the size of the next write: whole lines, if there are any in what a pipe takes at once, since other programs
// may write to it too.
size_t next_part(const std::string& text) {
  if (text.size() <= PIPE_BUF) return text.size();
  const size_t last = text.rfind('\n', PIPE_BUF - 1);
  return last == text.npos ? PIPE_BUF : last + 1;
}

}  // namespace

Output::Output(int fd) : fd_(fd), terminal_(reopened_terminal(fd)) {}

Output::~Output() {
  finish(10s);
  if (terminal_ >= 0) close(terminal_);
}

void Output::print(std::string_view text) {
  if (failed()) return;
  kept_ += text;
  write_until(Clock::now());
}

void Output::finish() {
  write_until(Clock::time_point::max());
}

bool Output::finish(std::chrono::milliseconds patience) {
  write_until(Clock::now() + patience);
  return !is_behind();
}

void Output::write_until(Clock::time_point deadline) {
  const int fd = terminal_ >= 0 ? terminal_ : fd_;
  while (is_behind() && !failed() && takes_more(fd, deadline)) {
    const SignalBlocked blocked(SIGXFSZ);  // a file that may not grow gives an error like a full disk
    const ssize_t written = write(fd, kept_.data(), next_part(kept_));
    if (written >= 0) {
      kept_.erase(0, static_cast<size_t>(written));
    } else if (errno == EAGAIN) {  // the room is too small for a character; a terminal makes two of "\n"
      if (Clock::now() >= deadline) break;
      std::this_thread::sleep_for(10ms);
    } else if (errno != EINTR) {
      error_ = errno;
    }
  }
  if (failed()) kept_.clear();
}

}  // namespace lockstep::cli
