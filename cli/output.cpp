#include "output.hpp"

#include <unistd.h>

#include <cerrno>

namespace lockstep::cli {

void Output::print(std::string_view text) {
  while (!text.empty() && !failed()) {
    const ssize_t written = write(fd_, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<size_t>(written));
    } else if (errno != EINTR) {
      error_ = errno;
    }
  }
}

}  // namespace lockstep::cli
