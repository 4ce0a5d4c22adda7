// FolderLock: lets one process at a time work in a folder. However a process ends, the system gives the lock back.
//
// It holds the file `.lock` in the folder, which keeps processes of all machines out (see FileLock). It also holds the
// folder (flock), as earlier versions did: so old and new versions keep each other out. If the file cannot be locked,
// other machines are not kept out. If the folder cannot be locked either, nobody is kept out. doubt() says which case
// it is. Use it from one thread.
//
// The file stays when the lock is given back.
#pragma once

#include <filesystem>
#include <string>

namespace lockstep::io {

inline constexpr const char* kLockFile = ".lock";

// At most one FileLock holds a file. However its process ends, the system gives the lock back. The lock is a
// byte-range lock of the whole file that belongs to the open file (F_OFD_SETLK). NFS passes such a lock on to its
// server, so all machines see the lock. The server's own machine sees it too, but would not see an flock(). If NFS is
// mounted with `nolock` or `local_lock`, only one machine sees the lock, unnoticed. Use it from one thread.
class FileLock {
 public:
  ~FileLock();
  FileLock& operator=(FileLock&&) = delete;

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

class FolderLock {
 public:
  ~FolderLock();
  FolderLock& operator=(FolderLock&&) = delete;

  // Returns false if another FolderLock holds the folder. If neither the file nor the folder can be locked, everybody
  // gets true. Call take() once.
  bool take(const std::filesystem::path& folder);

  // Says what the user can do: "wait for it, …". Call it after take() gave false.
  const std::string& advice() const { return advice_; }

  // Says why the lock may keep nobody out ("runs/a cannot be locked (No locks available), …"), or "". Call it after
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
