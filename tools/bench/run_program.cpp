#include "run_program.hpp"

#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <lockstep/base/error.hpp>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <thread>

#include "io/reason.hpp"

namespace lockstep::cli {

namespace {

// MemoryFile: makes a file in memory. Unlike a pipe it never fills up, so nobody has to read while the program writes.
class MemoryFile {
 public:
  explicit MemoryFile(const char* name) : fd_(memfd_create(name, MFD_CLOEXEC)) {
    if (fd_ < 0) throw Error("memfd_create failed: " + io::reason(errno), {Error::machine});
  }
  ~MemoryFile() { ::close(fd_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  int fd() const { return fd_; }

  std::string content() const {
    std::string bytes;
    char buffer[1 << 16];
    for (;;) {
      ssize_t count = ::pread(fd_, buffer, sizeof buffer, static_cast<off_t>(bytes.size()));
      if (count < 0) throw Error("reading a file in memory failed: " + io::reason(errno), {Error::machine});
      if (count == 0) return bytes;
      bytes.append(buffer, static_cast<size_t>(count));
    }
  }

 private:
  int fd_;
};

pid_t start(const std::vector<std::string>& arguments, int out, int err) {
  std::vector<char*> argv;
  argv.reserve(arguments.size() + 1);
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, out, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, err, STDERR_FILENO);

  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none, all;
  sigemptyset(&none);
  sigfillset(&all);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &all);
  posix_spawnattr_setpgroup(&attributes, 0);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);

  pid_t child = 0;
  int error = posix_spawnp(&child, argv[0], &actions, &attributes, argv.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  if (error == ENOENT)
    throw Error("the program '" + arguments[0] + "' is not installed, or not in PATH", {Error::machine});
  if (error != 0)
    throw Error("the program '" + arguments[0] + "' could not be started: " + io::reason(error), {Error::machine});
  return child;
}

// Gives the child's status as waitpid does. Kills the child and its whole group when the time is over.
int wait_for(pid_t child, const std::string& program, std::chrono::milliseconds limit) {
  auto deadline = std::chrono::steady_clock::now() + limit;
  auto pause = std::chrono::milliseconds(1);
  int status = 0;
  for (;;) {
    pid_t ended = ::waitpid(child, &status, WNOHANG);
    if (ended == child) return status;
    if (ended < 0 && errno != EINTR)
      throw Error("waiting for '" + program + "' failed: " + io::reason(errno), {Error::machine});
    if (std::chrono::steady_clock::now() >= deadline) break;
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::milliseconds(20));
  }
  ::kill(-child, SIGKILL);
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  throw Error("'" + program + "' did not finish within " + std::to_string(limit.count()) + " ms and was killed",
              {Error::machine});
}

}  // namespace

std::string run_program(const std::vector<std::string>& arguments, std::chrono::milliseconds limit) {
  const std::string& program = arguments.at(0);
  const MemoryFile out("output"), err("errors");
  std::signal(SIGCHLD, SIG_DFL);  // where it is ignored, the system forgets how the program ended
  const int status = wait_for(start(arguments, out.fd(), err.fd()), program, limit);
  if (status == 0) return out.content();
  throw Error("'" + program + "' " +
                  (WIFSIGNALED(status) ? "was ended by signal " + std::to_string(WTERMSIG(status))
                                       : "failed with exit code " + std::to_string(WEXITSTATUS(status))) +
                  ": " + err.content(),
              {Error::machine});
}

}  // namespace lockstep::cli
