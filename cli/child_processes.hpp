// ChildProcesses: the processes that `lockstep launch` starts and outlives.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <csignal>
#include <string>
#include <thread>
#include <vector>

namespace lockstep::cli {

class ChildProcesses {
 public:
  struct Options {
    bool label = false;  // "[1] " before every line of rank 1
  };

  // From here on, signals to end and of children are blocked, in this thread and in those started later. Make it before
  // other threads.
  explicit ChildProcesses(Options options);
  // Kills those that still run.
  ~ChildProcesses();
  ChildProcesses(const ChildProcesses&) = delete;
  ChildProcesses& operator=(const ChildProcesses&) = delete;

  // Starts a program, found through PATH, in a process group of its own, with `variables` ("NAME=value") over the
  // environment. Only the first one reads the standard input. Throws Error that names the program.
  void start(const std::vector<std::string>& words, const std::vector<std::string>& variables);

  // Waits for all of them, passes signals on, and says on the standard error how one ended that failed. Then the others
  // have `grace` to end by themselves (ranks notice it, and say why), then get SIGTERM, and 5 s later SIGKILL. The
  // first failure's exit code, 128 + the number of a signal; 0 if all succeeded.
  int wait(std::chrono::milliseconds grace);

 private:
  using Clock = std::chrono::steady_clock;
  struct Child {
    pid_t pid = 0;  // 0: has ended
    std::thread labels;
  };

  bool reap();  // whether any still run
  void ended(int rank, int status);
  void end_others();
  void send(int signal) const;

  const Options options_;
  sigset_t awaited_;
  sigset_t mask_before_;
  std::vector<Child> children_;
  Clock::time_point started_;
  int first_failure_ = 0;
  Clock::time_point next_step_ = Clock::time_point::max();  // of ending the others
  int next_signal_ = SIGTERM;
};

}  // namespace lockstep::cli
