// FileSystem: makes the system's calls that bring a file to the disk. It is an object so that tests can make each fail.
//
// Every function is the system call of its name: it has the same result, and sets errno.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <filesystem>

namespace lockstep::io {

class FileSystem {
 public:
  virtual ~FileSystem() = default;
  virtual int create(const std::filesystem::path& file) {  // opens a new file for writing; fails if the file is there
    return ::open(file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  }
  virtual ssize_t write(int fd, const void* data, size_t bytes);
  virtual int fsync(int fd) { return ::fsync(fd); }
  virtual int close(int fd) { return ::close(fd); }
  virtual int rename(const std::filesystem::path& from, const std::filesystem::path& to) {
    return ::rename(from.c_str(), to.c_str());
  }
  virtual int unlink(const std::filesystem::path& file) { return ::unlink(file.c_str()); }

  // Brings the names in a folder to the disk (fsync). If the system cannot flush a folder (some network file systems),
  // or may not read it, this does nothing and succeeds.
  virtual int sync_folder(const std::filesystem::path& folder);
};

// Gives the system's own calls, without state.
FileSystem& real_files();

}  // namespace lockstep::io
