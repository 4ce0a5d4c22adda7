// The libraries of faults (LD_PRELOAD) share when a fault comes, and how a process dies of it. They are loaded before
// all else and need the C library only.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace fault {

inline std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Whether this is call number $FAULT_AT, or one of several ("1,2"). All are counted, from 1, in the file
// $FAULT_FILE.count, which grows by a byte with each: the processes of a job share it.
inline bool is_time() {
  const std::string file = variable("FAULT_FILE") + ".count";
  const int fd = open(file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  const bool counted = syscall(SYS_write, fd, "+", 1) == 1;  // write() itself may be the call that is counted
  const long number = static_cast<long>(lseek(fd, 0, SEEK_CUR));
  close(fd);
  return counted && ("," + variable("FAULT_AT") + ",").find("," + std::to_string(number) + ",") != std::string::npos;
}

[[noreturn]] inline void die() {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

}  // namespace fault
