#include "output.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

namespace lockstep::cli {
namespace {

using Clock = std::chrono::steady_clock;

// Whether a write of up to PIPE_BUF bytes would not wait. It need not succeed: the reader may be gone.
bool takes_more(int fd, Clock::time_point deadline) {
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd polled{fd, POLLOUT, 0};
    const int ready = poll(&polled, 1, static_cast<int>(std::clamp<int64_t>(left, 0, 1000)));
    if (ready > 0) return true;
    if (left <= 0) return false;
  }
}

}  // namespace

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
  while (is_behind() && !failed() && takes_more(fd_, deadline)) {
    const ssize_t written = write(fd_, kept_.data(), std::min<size_t>(kept_.size(), PIPE_BUF));
    if (written >= 0) {
      kept_.erase(0, static_cast<size_t>(written));
    } else if (errno != EINTR) {
      error_ = errno;
    }
  }
  if (failed()) kept_.clear();
}

}  // namespace lockstep::cli
