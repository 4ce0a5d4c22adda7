// FolderLock: one process at a time works in a folder. The system gives the lock back when a process ends, however.
#pragma once

#include <filesystem>

namespace lockstep::io {

class FolderLock {
 public:
  FolderLock() = default;
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

  // False if another one holds it. Where the file system has no locks, everybody gets it.
  bool take(const std::filesystem::path& folder);

 private:
  int fd_ = -1;
};

}  // namespace lockstep::io
