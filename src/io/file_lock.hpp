// FileLock: at most one FileLock holds a file. The system gives it back in whatever way its process ends.
//
// It is a byte-range lock of the whole file, of the open file's own (F_OFD_SETLK). NFS passes such a lock on to its
// server, so all machines see it, and so does the server's own machine, which would not see an flock(). Mounted with
// `nolock` or `local_lock`, NFS keeps it to one machine, and nothing tells. Used by one thread.
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

  // Makes the file if it is missing. Refused: another one holds it. Impossible: the file cannot be opened for writing,
  // or its file system has no locks; error() is the system's reason. To be called once.
  Outcome take(const std::filesystem::path& file);
  int error() const { return error_; }

  // Removes the file while it is held, and gives it back. Does nothing if it is not held.
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
