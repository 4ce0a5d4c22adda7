// A library to preload (LD_PRELOAD): the process is killed at a call that changes a file or folder whose path holds
// $FAULT_FOLDER. FAULT_AT and FAULT_FILE: see fault.hpp. Of what it writes at that moment one half gets into the file.
// With FAULT_LOCK nobody is killed: flock() and fcntl()'s locks fail with that error number, as on a file system
// without locks.
#include "fault.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstdarg>

namespace {

bool is_watched(const std::string& path) {
  const std::string folder = fault::variable("FAULT_FOLDER");
  return !folder.empty() && path.find(folder) != std::string::npos;
}

bool is_time(const char* path) {
  return is_watched(path) && fault::is_time();
}

bool is_time(int fd) {
  char path[4096] = {};
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  return readlink(link.c_str(), path, sizeof path - 1) > 0 && is_time(path);
}

template <class Function>
Function real(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

ssize_t write(int fd, const void* data, size_t size) {
  if (is_time(fd)) {
    syscall(SYS_write, fd, data, size / 2);
    fault::die();
  }
  return syscall(SYS_write, fd, data, size);
}

ssize_t writev(int fd, const iovec* parts, int count) {
  if (is_time(fd)) {
    syscall(SYS_writev, fd, parts, count / 2);
    fault::die();
  }
  return syscall(SYS_writev, fd, parts, count);
}

int fsync(int fd) {
  if (is_time(fd)) fault::die();
  return static_cast<int>(syscall(SYS_fsync, fd));
}

int rename(const char* from, const char* to) {
  if (is_time(to)) fault::die();
  static const auto next = real<int (*)(const char*, const char*)>("rename");
  return next(from, to);
}

int unlink(const char* path) {
  if (is_time(path)) fault::die();
  static const auto next = real<int (*)(const char*)>("unlink");
  return next(path);
}

int remove(const char* path) {
  if (is_time(path)) fault::die();
  static const auto next = real<int (*)(const char*)>("remove");
  return next(path);
}

int flock(int fd, int operation) {
  const std::string error = fault::variable("FAULT_LOCK");
  if (error.empty()) return static_cast<int>(syscall(SYS_flock, fd, operation));
  errno = std::atoi(error.c_str());
  return -1;
}

int fcntl(int fd, int command, ...) {
  va_list arguments;
  va_start(arguments, command);
  void* const argument = va_arg(arguments, void*);
  va_end(arguments);
  const std::string error = command == F_OFD_SETLK ? fault::variable("FAULT_LOCK") : "";
  if (error.empty()) return static_cast<int>(syscall(SYS_fcntl, fd, command, argument));
  errno = std::atoi(error.c_str());
  return -1;
}

int mkdir(const char* path, mode_t mode) {
  if (is_time(path)) fault::die();
  static const auto next = real<int (*)(const char*, mode_t)>("mkdir");
  return next(path, mode);
}

}  // extern "C"
