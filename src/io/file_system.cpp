#include "file_system.hpp"

#include <cerrno>
#include <csignal>

#include "base/signals.hpp"

namespace lockstep::io {

ssize_t FileSystem::write(int fd, const void* data, size_t bytes) {
  const SignalBlocked blocked(SIGXFSZ);  // write() beyond the limit then fails as on a full disk
  return ::write(fd, data, bytes);
}

int FileSystem::sync_folder(const std::filesystem::path& folder) {
  const int fd = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return errno == EACCES ? 0 : -1;
  const int error = ::fsync(fd) == 0 || errno == EINVAL || errno == ENOTSUP ? 0 : errno;
  ::close(fd);
  errno = error;
  return error == 0 ? 0 : -1;
}

FileSystem& real_files() {
  static FileSystem files;
  return files;
}

}  // namespace lockstep::io
