// FolderLock: one process at a time works in a folder. The system gives the lock back in whatever way a process ends.
//
// It holds the file `.lock` in the folder, which keeps processes of all machines out (see FileLock). It also holds the
// folder itself (flock), as earlier versions did: these are kept out, and keep out. If the file cannot be
// locked, other machines are not kept out; if the folder cannot be either, nobody is. doubt() says which. Used by one
// thread.
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

  // False if another one holds it. If neither can be locked, everybody gets it. To be called once.
  bool take(const std::filesystem::path& folder);

  // After take() gave false: what the user can do, "wait for it, or stop it…".
  const std::string& advice() const { return advice_; }

  // After take(): why it may keep nobody out, "runs/a cannot be locked (No locks available), …"; empty if it does.
  const std::string& doubt() const { return doubt_; }

  // If it is held, removes the file, so that the folder can be removed. Other machines are not kept out from here on.
  void remove_file() { file_.remove(); }

 private:
  void close();

  int folder_ = -1;
  FileLock file_;
  std::string advice_ = "wait for it, or stop it", doubt_;
};

}  // namespace lockstep::io
