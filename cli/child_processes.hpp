// ChildProcesses: the processes that `lockstep launch` starts and outlives.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "launch_messages.hpp"
#include "memory_kills.hpp"

namespace lockstep::cli {

class ChildProcesses {
 public:
  struct Options {
    std::string name = "rank";  // of a process in what is said: "rank 1"
    bool label = false;         // "[1] " before every line of rank 1
    // How long the others may go on after a process failed: until SIGTERM comes, and then until SIGKILL comes.
    std::chrono::milliseconds until_term{2'000}, until_kill{3'000};
    // The first of these times if they stop because the user asked for it: they end their step and keep what they have.
    std::chrono::milliseconds until_term_when_stopped{30'000};
    // Called when a process has ended. Gives whether the others go on without it, if it failed: then they are left
    // alone.
    struct End {
      bool failed;
      bool stopped;        // since the user asked for it
      bool killed;         // by a signal, while nothing was to end
      std::string how;     // words for a sentence: "it ended with exit code 7"
      bool lacked_memory;  // the kernel has probably killed it for want of memory
    };
    std::function<bool(int rank, const End& end)> on_end = {};
    // Called again and again until the processes are to end. It may call start() and end(). Gives whether it has
    // called start().
    std::function<bool()> look = {};
  };

  // From here on, signals that ask to end, and those of children, are blocked in this thread and in threads started
  // later. So make it before other threads. A process that ignores SIGCHLD stops ignoring it; those that it starts
  // ignore it.
  ChildProcesses(Options options, LaunchMessages& messages);
  // Kills those that still run, and what they started.
  ~ChildProcesses();
  ChildProcesses(const ChildProcesses&) = delete;
  ChildProcesses& operator=(const ChildProcesses&) = delete;

  // Starts a program, found through PATH, in a process group of its own, with `variables` ("NAME=value") over the
  // environment. Only the first one reads the standard input. `number` is its rank, or else what it is called by.
  // Throws Error that names the program.
  void start(const std::vector<std::string>& words, const std::vector<std::string>& variables, int number);

  void end(int rank);  // kills it, and what it started

  struct Ending {
    // The exit code of the first process that failed and that the others do not go on without, or 128 + the number of
    // its signal. If a process had to be ended after a request, or none ran when it came, 128 + the request's number.
    // 0 if there was neither.
    int code = 0;
    bool failed = false;  // a process failed that the others do not go on without
    // A signal that asks to end was passed on, or a process's exit code says that it got one.
    bool by_request = false;
  };

  // Waits for all of them, and for who reads their labelled lines, and passes signals on. A request to stand still
  // (Ctrl-Z) holds for them and this process, until SIGCONT. Says on the standard error how the first one that failed
  // ended. Ends the others as the options say, and then what they left running in their process groups.
  Ending wait();

 private:
  using Clock = std::chrono::steady_clock;
  struct Child {
    int number = 0;
    pid_t pid = 0;      // also of its process group
    pid_t watcher = 0;  // in that group
    bool runs = true;
    bool is_to_end = false;  // end() has killed it
    std::thread labels;
  };

  struct Member {
    pid_t group = 0;
    char state = 0;  // as in /proc/PID/stat
  };

  bool reap();  // whether any still run
  std::string name_of(int rank) const;
  void ended(const Child& child, int signal, int code);
  void say_how(int rank, int code, int signal, const std::string& cause, bool is_lost);
  void end_others();
  void end_leftovers();
  void end_watchers();
  void end_labels();
  void await_signal();  // until the next look
  void pass_on(int signal);
  void stand_still();
  void send(int signal) const;
  std::vector<Member> members() const;
  void say_who_stands_still() const;
  bool others_are_ended() const { return next_signal_ != SIGTERM; }

  const Options options_;
  LaunchMessages& messages_;
  MemoryKills memory_kills_;
  sigset_t awaited_;
  sigset_t mask_before_;
  struct sigaction on_child_before_ {};  // what SIGCHLD does in the processes
  std::vector<Child> children_;
  int alive_[2] = {-1, -1};  // a pipe whose end tells the watchers that this process is gone
  int done_[2] = {-1, -1};   // a pipe whose closed end tells the threads of the labels that nothing more will come
  Clock::time_point started_;
  int stop_signal_ = 0;               // that was passed on
  std::atomic<int> labels_{0};        // threads of children that run
  std::atomic<bool> hurries_{false};  // they no longer wait for long for who reads
  int first_failure_ = 0;
  bool failed_ = false;
  bool asked_ = false;                                      // not by the launcher
  Clock::time_point next_step_ = Clock::time_point::max();  // of ending the others
  int next_signal_ = SIGTERM;
};

}  // namespace lockstep::cli
