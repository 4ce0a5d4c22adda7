#include "folder_lock.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "reason.hpp"

namespace lockstep::io {

FileLock::~FileLock() {
  close();
}

FileLock::Outcome FileLock::take(const std::filesystem::path& file) {
  file_ = file;
  constexpr int kTries = 100;  // each try but the last ends with a file that somebody removed at that moment
  for (int i = 0; i < kTries; ++i) {
    const Outcome outcome = try_once();
    if (outcome != Outcome::held || is_the_file()) return outcome;
    close();
  }
  return Outcome::refused;
}

FileLock::Outcome FileLock::try_once() {
  fd_ = ::open(file_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
  struct flock whole = {};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  if (fd_ >= 0 && ::fcntl(fd_, F_OFD_SETLK, &whole) == 0) return Outcome::held;
  error_ = errno;
  const bool refused = fd_ >= 0 && (error_ == EAGAIN || error_ == EACCES);
  close();
  return refused ? Outcome::refused : Outcome::impossible;
}

// The holder before may have removed the file between our open() and our lock. Then we have locked a file that nobody
// finds any more.
bool FileLock::is_the_file() const {
  struct stat ours = {}, there = {};
  return ::fstat(fd_, &ours) == 0 && ::lstat(file_.c_str(), &there) == 0 && ours.st_dev == there.st_dev &&
         ours.st_ino == there.st_ino;
}

void FileLock::remove() {
  if (fd_ < 0) return;
  ::unlink(file_.c_str());
  close();  // NFS keeps a removed file under another name until this call
}

void FileLock::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

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
