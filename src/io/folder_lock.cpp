#include "folder_lock.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>

#include "reason.hpp"

namespace lockstep::io {

FolderLock::~FolderLock() {
  if (fd_ >= 0) ::close(fd_);
}

bool FolderLock::take(const std::filesystem::path& folder) {
  fd_ = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd_ >= 0 && ::flock(fd_, LOCK_EX | LOCK_NB) == 0) return true;
  if (fd_ >= 0 && errno == EWOULDBLOCK) return false;
  doubt_ = folder.string() + " cannot be locked (" + reason(errno) + "), as on some network file systems";
  return true;
}

}  // namespace lockstep::io
