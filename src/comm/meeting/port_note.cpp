#include "port_note.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/atomic_file.hpp"

#include <charconv>
#include <filesystem>

namespace lockstep::comm {
namespace {

std::string port_file_of(const std::string& job) {
  std::string name = "lockstep-" + std::to_string(getuid()) + "-" + job + ".port";
  for (char& c : name) {
    if (c == '/') c = '_';
  }
  return (std::filesystem::temp_directory_path() / name).string();
}

}  // namespace

PortNote::PortNote(const std::string& job) : file_(port_file_of(job)) {}

void PortNote::leave(int port) {
  io::write_file(file_, std::to_string(port));
  is_left_ = true;
}

// A file of another user's counts for nothing.
int PortNote::read() const {
  const int fd = open(file_.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return 0;
  struct stat status {};
  char text[16] = {};
  const bool ours = fstat(fd, &status) == 0 && status.st_uid == getuid();
  const ssize_t size = ours ? ::read(fd, text, sizeof text) : 0;
  close(fd);
  int port = 0;
  if (size > 0) std::from_chars(text, text + size, port);
  return port;
}

void PortNote::take_away() {
  if (is_left_) unlink(file_.c_str());
  is_left_ = false;
}

}  // namespace lockstep::comm
