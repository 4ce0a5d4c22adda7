// FileLock: lets at most one FileLock hold a file. However its process ends, the system gives the lock back.
//
// The lock is a byte-range lock of the whole file that belongs to the open file (F_OFD_SETLK). NFS passes such a lock
// on to its server, so all machines see the lock. The server's own machine sees it too, but would not see an flock().
// If NFS is mounted with `nolock` or `local_lock`, only one machine sees the lock, and nothing tells. Used by one
// thread.
#pragma once

#include <filesystem>

namespace lockstep::io {

class FileLock {
 public:
  FileLock() = default;
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

  enum class Outcome { held, refused, impossible };

  // Makes the file if it is missing. `refused`: another FileLock holds the file. `impossible`: the file cannot be
  // opened for writing, or its file system has no locks; error() is the system's reason. Call take() once.
  Outcome take(const std::filesystem::path& file);
  int error() const { return error_; }

  // Removes the file while it is held, and gives the lock back. Does nothing if the file is not held.
  void remove();

 private:
  Outcome try_once();
  bool is_the_file() const;
  void close();

  std::filesystem::path file_;
  int fd_ = -1;  // open only while the lock is held
  int error_ = 0;
};

}  // namespace lockstep::io
