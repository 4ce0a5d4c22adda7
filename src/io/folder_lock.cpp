#include "folder_lock.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "reason.hpp"

namespace lockstep::io {

FolderLock::~FolderLock() {
  close();
}

void FolderLock::close() {
  if (folder_ >= 0) ::close(std::exchange(folder_, -1));
}

bool FolderLock::take(const std::filesystem::path& folder) {
  folder_ = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool here = folder_ >= 0 && ::flock(folder_, LOCK_EX | LOCK_NB) == 0;
  const int error = here ? 0 : errno;
  if (folder_ >= 0 && error == EWOULDBLOCK) return false;
  const auto file = folder / kLockFile;
  const auto outcome = file_.take(file);
  if (outcome == FileLock::Outcome::refused) {
    close();
    if (here)  // the holder cannot be on this machine: flock() would have seen it
      advice_ +=
          ", on the machine where it runs. If that machine is gone, and its file server keeps the lock, remove " +
          file.string();
    return false;
  }
  if (outcome == FileLock::Outcome::held) return true;
  const std::string why = " (" + reason(file_.error()) + ")";
  doubt_ = here ? folder.string() + " is locked on this machine alone, since " + file.string() + " cannot be" + why
                : folder.string() + " cannot be locked" + why + ", as on some network file systems";
  return true;
}

}  // namespace lockstep::io
