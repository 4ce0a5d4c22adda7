// Program: the program lockstep as users start it, with a pipe or a terminal at the other end.
//
// To start a program costs a third of a second, in which LibTorch loads. A test program that is linked with main()'s
// work does the work in a copy of itself, which has LibTorch already. What preloads a library is started anew.
#pragma once

#include <ATen/Parallel.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "io/process_stat.hpp"
#include "support/time_limits.hpp"

// Null in a test program without them.
namespace lockstep::cli {
[[gnu::weak]] int run_lockstep(int argc, char** argv);
[[gnu::weak]] int run_bench(int argc, char** argv);
}  // namespace lockstep::cli
namespace scenarios {
[[gnu::weak]] int run_scenario(int argc, char** argv);
}

namespace lockstep {

// The programs get the tests' own values of these: all must compute as on one kind of processor.
inline constexpr const char* kInstructions[] = {"ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS",
                                                "MKL_CBWR"};

struct Surroundings {
  std::string program = {};                   // another one than lockstep
  std::filesystem::path folder = "/";         // the working directory
  std::vector<std::string> environment = {};  // all of it but kInstructions: "NAME=value"
  bool terminal = false;                      // both outputs and the input are one, and err stays empty
  int columns = 80;                           // columns of the terminal
  std::string out = {};                       // a file for the standard output instead of a pipe
  bool ignore_interrupt = false;              // the program ignores SIGINT, as a shell script's background jobs do
  int pipe_bytes = 0;                         // bytes that the outputs' pipes hold; 0: as the system has it
  int full_output = 0;                        // 1 or 2: nothing more fits into this one of the outputs
  bool starts_itself = false;                 // so it must not be a copy of the test
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
    if (surroundings.program.empty() && lockstep == nullptr)
      throw std::runtime_error("set LOCKSTEP_PROGRAM to the program's path; ctest does");
    std::vector<std::string> words = {surroundings.program.empty() ? lockstep : surroundings.program};
    words.insert(words.end(), arguments.begin(), arguments.end());
    int ours[2] = {-1, -1}, theirs[2] = {-1, -1};
    if (surroundings.terminal) {
      ours[0] = open_terminal(surroundings.columns);
    } else {
      for (int i = 0; i < 2; ++i) {
        int ends[2];
        check(pipe2(ends, O_CLOEXEC) == 0, "pipe2");
        if (surroundings.pipe_bytes > 0) fcntl(ends[0], F_SETPIPE_SZ, surroundings.pipe_bytes);
        ours[i] = ends[0];
        theirs[i] = ends[1];
      }
    }
    const std::string terminal = surroundings.terminal ? ptsname(ours[0]) : "";
    std::cout.flush();  // else the copy would have the text in memory too
    std::fflush(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      set_up(surroundings, terminal, theirs);
      run(words, with_instructions(surroundings.environment), surroundings.starts_itself);
    }
    for (int fd : theirs) {
      if (fd >= 0) close(fd);
    }
    out_fd_ = ours[0];
    err_fd_ = ours[1];
    check(pid_ > 0, "fork");
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

  void resize(int columns) { set_columns(out_fd_, columns); }  // sets the terminal's columns

  // Reads a little, which makes little room.
  void take(size_t bytes) {
    std::string taken(bytes, '\0');
    check(read(out_fd_, taken.data(), bytes) > 0, "read");
  }

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

  // Sets the new process's session, descriptors and folder, and signals as a shell in a terminal hands them on,
  // whatever started the tests.
  static void set_up(const Surroundings& surroundings, const std::string& terminal, const int (&outputs)[2]) {
    setsid();
    // The first terminal that a session's leader opens becomes the one whose Ctrl-C it gets.
    dup2(open(terminal.empty() ? "/dev/null" : terminal.c_str(), terminal.empty() ? O_RDONLY : O_RDWR), 0);
    for (int i = 0; i < 2; ++i) dup2(terminal.empty() ? outputs[i] : 0, i + 1);
    if (!surroundings.out.empty()) dup2(open(surroundings.out.c_str(), O_WRONLY), 1);
    if (surroundings.full_output > 0) fill(surroundings.full_output);
    close_range(3, ~0U, 0);
    for (int number = 1; number < NSIG; ++number) signal(number, SIG_DFL);
    if (surroundings.ignore_interrupt) signal(SIGINT, SIG_IGN);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    if (chdir(surroundings.folder.c_str()) != 0) _exit(126);
  }

  static std::vector<std::string> with_instructions(std::vector<std::string> environment) {
    for (const std::string name : kInstructions) {
      const auto is_set = [&](const std::string& variable) { return variable.starts_with(name + "="); };
      const char* const value = std::getenv(name.c_str());
      if (value != nullptr && std::none_of(environment.begin(), environment.end(), is_set))
        environment.push_back(name + "=" + value);
    }
    return environment;
  }

  static void fill(int fd) {
    const int flags = fcntl(fd, F_GETFL);
    fcntl(fd, F_SETFL, flags | O_NONBLOCK);
    for (bool had_room = true; had_room; usleep(20'000)) {  // a terminal makes room once more a moment later
      had_room = false;
      while (write(fd, ".", 1) > 0) had_room = true;
    }
    fcntl(fd, F_SETFL, flags);
  }

  using Main = int (*)(int, char**);
  static Main main_of(const std::string& program, const std::vector<std::string>& environment) {
    const auto preloads = [](const std::string& variable) { return variable.starts_with("LD_PRELOAD="); };
    if (std::any_of(environment.begin(), environment.end(), preloads)) return nullptr;
    const auto is = [&](const char* variable) {
      const char* const path = std::getenv(variable);
      return path != nullptr && program == path;
    };
    return is("LOCKSTEP_PROGRAM")         ? cli::run_lockstep
           : is("LOCKSTEP_BENCH_PROGRAM") ? cli::run_bench
           : is("LOCKSTEP_RANKS_PROGRAM") ? scenarios::run_scenario
                                          : nullptr;
  }

  [[noreturn]] static void run(std::vector<std::string>& words, std::vector<std::string> variables,
                               bool starts_itself) {
    const Main main = starts_itself ? nullptr : main_of(words[0], variables);
    const auto environment = new std::vector(pointers(variables));  // lives as long as the process
    if (main == nullptr) {
      execve(words[0].c_str(), pointers(words).data(), environment->data());
      _exit(127);
    }
    environ = environment->data();
    at::set_num_threads(1);  // the first call in a copy makes LibTorch's pool anew, and no two threads may do that
    const int code = main(static_cast<int>(words.size()), pointers(words).data());
    std::cout.flush();
    std::fflush(nullptr);
    _exit(code);  // AddressSanitizer would take for leaks what only the original's other threads know
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

// Gives what the kernel says of a process: 'T' for one that a signal has stopped; 0 if there is none.
inline char state_of(pid_t pid) {
  const std::string text = io::stat_after_name("/proc/" + std::to_string(pid));
  return text.empty() ? '\0' : text[0];
}

inline bool wait_for_state(pid_t pid, char state) {
  return comes_true([&] { return state_of(pid) == state; });
}

// Until the main thread blocks the signal, since another one waits for it.
inline bool wait_until_blocked(pid_t pid, int signal) {
  return comes_true([&] {
    std::ifstream status("/proc/" + std::to_string(pid) + "/status");
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("SigBlk:")) return (std::stoull(line.substr(7), nullptr, 16) >> (signal - 1) & 1) != 0;
    }
    return false;
  });
}

inline Finished run_program(const std::vector<std::string>& arguments, const Surroundings& surroundings) {
  return Program(arguments, surroundings).finish();
}

inline std::string from_environment(const char* name) {
  const char* const value = std::getenv(name);
  if (value == nullptr) throw std::runtime_error("set " + std::string(name) + "; ctest does");
  return value;
}

// The same with lockstep-bench.
inline Finished run_bench(const std::vector<std::string>& arguments, Surroundings surroundings) {
  surroundings.program = from_environment("LOCKSTEP_BENCH_PROGRAM");
  return run_program(arguments, surroundings);
}

}  // namespace lockstep
