// FolderLock: one process at a time works in a folder. The system gives the lock back when a process ends, however.
//
// Where a file system has no locks, nobody is kept out, and doubt() says so. Linux knows a lock of a folder on NFS on
// the machine alone that took it: processes of other machines are not kept out. Used by one thread.
#pragma once

#include <filesystem>
#include <string>

namespace lockstep::io {

class FolderLock {
 public:
  FolderLock() = default;
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

  // False if another one holds it. Where the file system has no locks, everybody gets it. To be called once.
  bool take(const std::filesystem::path& folder);

  // After take(): why it keeps nobody out, "runs/a cannot be locked (No locks available), …"; empty if it does.
  const std::string& doubt() const { return doubt_; }

 private:
  int fd_ = -1;
  std::string doubt_;
};

}  // namespace lockstep::io
