// FolderLock: lets one process at a time work in a folder. However a process ends, the system gives the lock back.
//
// It holds the file `.lock` in the folder, which keeps processes of all machines out (see FileLock). It also holds the
// folder itself (flock). Earlier versions did only that: they are kept out, and keep others out. If the file cannot be
// locked, other machines are not kept out. If the folder cannot be locked either, nobody is kept out. doubt() says
// which. Used by one thread.
//
// The file stays when the lock is given back.
#pragma once

#include <filesystem>
#include <string>

#include "file_lock.hpp"

namespace lockstep::io {

inline constexpr const char* kLockFile = ".lock";

class FolderLock {
 public:
  FolderLock() = default;
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

  // Returns false if another FolderLock holds the folder. If neither can be locked, everybody gets it. Call take()
  // once.
  bool take(const std::filesystem::path& folder);

  // The user can do this ("wait for it, or stop it…"). Call it after take() gave false.
  const std::string& advice() const { return advice_; }

  // Why the lock may keep nobody out ("runs/a cannot be locked (No locks available), …"), or empty. Call it after
  // take().
  const std::string& doubt() const { return doubt_; }

  // Removes the file if it is held, so that the folder can be removed. From then on other machines are not kept out.
  void remove_file() { file_.remove(); }

 private:
  void close();

  int folder_ = -1;
  FileLock file_;
  std::string advice_ = "wait for it, or stop it", doubt_;
};

}  // namespace lockstep::io
