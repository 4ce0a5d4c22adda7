// Program: the program lockstep as its users start it, with a pipe or a terminal at the other end.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "io/process_stat.hpp"

namespace lockstep {

struct Surroundings {
  std::string program = {};                   // another one than lockstep
  std::filesystem::path folder = "/";         // the working directory
  std::vector<std::string> environment = {};  // all of it: "NAME=value"
  bool terminal = false;                      // both outputs and the input are one, and err stays empty
  int columns = 80;                           // of the terminal
  std::string out = {};                       // a file for the standard output instead of a pipe
  bool ignore_interrupt = false;              // as a shell script starts its background jobs
};

struct Finished {
  int code = -1;  // the exit code; -1 for a process that a signal ended
  int signal = 0;
  std::string out, err;
};

class Program {
 public:
  Program(const std::vector<std::string>& arguments, const Surroundings& surroundings) {
    const char* const lockstep = std::getenv("LOCKSTEP_PROGRAM");
    const char* const program = surroundings.program.empty() ? lockstep : surroundings.program.c_str();
    if (program == nullptr) throw std::runtime_error("set LOCKSTEP_PROGRAM to the program's path; ctest does");
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    int ours[2] = {-1, -1}, theirs[2] = {-1, -1};
    if (surroundings.terminal) {
      ours[0] = open_terminal(surroundings.columns);
      // The first terminal that a session's leader opens becomes the one whose Ctrl-C it gets.
      posix_spawn_file_actions_addopen(&actions, 0, ptsname(ours[0]), O_RDWR, 0);
      posix_spawn_file_actions_adddup2(&actions, 0, 1);
      posix_spawn_file_actions_adddup2(&actions, 0, 2);
    } else {
      posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
      for (int i = 0; i < 2; ++i) {
        int ends[2];
        check(pipe2(ends, O_CLOEXEC) == 0, "pipe2");
        ours[i] = ends[0];
        theirs[i] = ends[1];
        posix_spawn_file_actions_adddup2(&actions, theirs[i], i + 1);
      }
      if (!surroundings.out.empty())
        posix_spawn_file_actions_addopen(&actions, 1, surroundings.out.c_str(), O_WRONLY, 0);
    }
    posix_spawn_file_actions_addchdir_np(&actions, surroundings.folder.c_str());

    // Signals as a shell in a terminal hands them on, whatever started the tests.
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    sigset_t defaults, none;
    sigemptyset(&none);
    sigfillset(&defaults);
    struct sigaction before {};
    sigaction(SIGINT, nullptr, &before);
    if (surroundings.ignore_interrupt) {
      sigdelset(&defaults, SIGINT);
      signal(SIGINT, SIG_IGN);
    }
    posix_spawnattr_setsigdefault(&attributes, &defaults);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSID);

    std::vector<std::string> words = {program};
    words.insert(words.end(), arguments.begin(), arguments.end());
    auto environment = surroundings.environment;
    const int error =
        posix_spawn(&pid_, program, &actions, &attributes, pointers(words).data(), pointers(environment).data());
    sigaction(SIGINT, &before, nullptr);
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
    for (int fd : theirs) {
      if (fd >= 0) close(fd);
    }
    out_fd_ = ours[0];
    err_fd_ = ours[1];
    check(error == 0, "posix_spawn");
  }

  ~Program() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    close_output();
    if (err_fd_ >= 0) close(err_fd_);
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // Waits until one of the outputs holds `text`; false if it ends, or a long time passes, without.
  bool wait_for(const std::string& text) {
    const auto deadline = Clock::now() + patience;
    while (out_.find(text) == std::string::npos && err_.find(text) == std::string::npos) {
      if (!read_some(deadline)) return false;
    }
    return true;
  }

  pid_t pid() const { return pid_; }
  void send(int signal) { ::kill(pid_, signal); }
  void type(const std::string& keys) { check(write(out_fd_, keys.data(), keys.size()) > 0, "write"); }

  void resize(int columns) { set_columns(out_fd_, columns); }  // of the terminal

  // The reader goes away, as `head` does.
  void close_output() {
    if (out_fd_ >= 0) close(std::exchange(out_fd_, -1));
  }

  // Reads to the end and waits for it.
  Finished finish() {
    const auto deadline = Clock::now() + patience;
    while (read_some(deadline)) {
    }
    if (Clock::now() > deadline) ::kill(pid_, SIGKILL);
    int status = 0;
    check(waitpid(std::exchange(pid_, -1), &status, 0) > 0, "waitpid");
    Finished result{.out = out_, .err = err_};
    if (WIFEXITED(status)) result.code = WEXITSTATUS(status);
    if (WIFSIGNALED(status)) result.signal = WTERMSIG(status);
    return result;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::seconds patience{240};  // far beyond what any of the tests needs, also with sanitizers

  static void check(bool ok, const char* what) {
    if (!ok) throw std::runtime_error(std::string(what) + ": " + std::strerror(errno));
  }

  static std::vector<char*> pointers(std::vector<std::string>& words) {
    std::vector<char*> result;
    for (auto& word : words) result.push_back(word.data());
    result.push_back(nullptr);
    return result;
  }

  static int open_terminal(int columns) {
    const int fd = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    check(fd >= 0 && grantpt(fd) == 0 && unlockpt(fd) == 0, "posix_openpt");
    set_columns(fd, columns);
    return fd;
  }

  static void set_columns(int fd, int columns) {
    winsize size{};
    size.ws_row = 24;
    size.ws_col = static_cast<unsigned short>(columns);
    check(ioctl(fd, TIOCSWINSZ, &size) == 0, "TIOCSWINSZ");
  }

  // Appends what has come; false at the end of both outputs or after the deadline.
  bool read_some(Clock::time_point deadline) {
    pollfd polled[2] = {{out_fd_, POLLIN, 0}, {err_fd_, POLLIN, 0}};  // poll ignores a closed one, -1
    if ((out_fd_ < 0 && err_fd_ < 0) || Clock::now() > deadline) return false;
    poll(polled, 2, 100);
    for (auto& [fd, events, seen] : polled) {
      if (fd < 0 || seen == 0) continue;
      char buffer[4096];
      const ssize_t size = read(fd, buffer, sizeof buffer);
      const bool is_out = fd == out_fd_;
      if (size > 0) {
        (is_out ? out_ : err_).append(buffer, static_cast<size_t>(size));
      } else {  // the end; a terminal says so by an error
        close(std::exchange(is_out ? out_fd_ : err_fd_, -1));
      }
    }
    return true;
  }

  pid_t pid_ = -1;
  int out_fd_ = -1;
  int err_fd_ = -1;
  std::string out_, err_;
};

// What the kernel says of a process: 'T' for one that a signal has stopped; 0 if there is none.
inline char state_of(pid_t pid) {
  const std::string text = io::stat_after_name("/proc/" + std::to_string(pid));
  return text.empty() ? '\0' : text[0];
}

// false: a long time has passed without.
inline bool wait_for_state(pid_t pid, char state) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (state_of(pid) != state) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

inline Finished run_program(const std::vector<std::string>& arguments, const Surroundings& surroundings) {
  return Program(arguments, surroundings).finish();
}

}  // namespace lockstep
