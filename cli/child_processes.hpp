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
    std::string name = "rank";  // a process's name in messages: "rank 1"
    bool label = false;         // a label such as "[1] " before every line of rank 1
    // Times that the others may go on after a process failed: until they get SIGTERM, and then until SIGKILL.
    std::chrono::milliseconds until_term{2'000}, until_kill{3'000};
    // Time until SIGTERM if the user asked for the stop: the processes end their step and keep the run.
    std::chrono::milliseconds until_term_when_stopped{30'000};
    // Runs when a process has ended. Tells whether the others go on without a failed one: then this class leaves them
    // alone.
    struct End {
      bool failed;
      bool stopped;        // the user asked it to stop
      bool killed;         // a signal ended it, while no process was to end
      std::string how;     // words for a sentence: "it ended with exit code 7"
      bool lacked_memory;  // the kernel has probably killed it for want of memory
    };
    std::function<bool(int rank, const End& end)> on_end = {};
    // Runs again and again until the processes are to end. May call start() and end(), and tells whether it has called
    // start().
    std::function<bool()> look = {};
  };

  // Blocks signals that ask to end, and SIGCHLD, in this thread and in threads started later. So make this object
  // before other threads. A process that ignores SIGCHLD stops doing so here, but the started processes ignore the
  // signal.
  ChildProcesses(Options options, LaunchMessages& messages);
  // Kills the processes that still run, and their descendants.
  ~ChildProcesses();
  ChildProcesses(const ChildProcesses&) = delete;
  ChildProcesses& operator=(const ChildProcesses&) = delete;

  // Starts a program, found through PATH, in a process group of its own, with `variables` ("NAME=value") added to the
  // environment. Only the first process reads the standard input. `number` is the program's rank, or else the number
  // that names it. Throws Error that names the program.
  void start(const std::vector<std::string>& words, const std::vector<std::string>& variables, int number);

  void end(int rank);  // kills the process, and its descendants

  struct Ending {
    // The exit code of the first failed process that the others need, or 128 + the number of its signal. If a process
    // had to be ended after a request, or none ran when the request came, it is 128 + the request's number. 0: there
    // was neither.
    int code = 0;
    bool failed = false;  // a process that the others need has failed
    // A signal that asks to end was passed on, or a process's exit code says that the process got one.
    bool by_request = false;
    // The words for the first failure while others ran, such as "rank 1 ended with exit code 7".
    std::string first_failure = {};
  };

  // Waits for all processes, and for the reader of their labelled lines, and passes signals on. A request to stand
  // still (Ctrl-Z) holds for all of them and this process, until SIGCONT. Says on the standard error how the first
  // process that failed ended. Ends the others as the options say, and then other processes in their process groups.
  Ending wait();

 private:
  using Clock = std::chrono::steady_clock;
  struct Child {
    int number = 0;
    pid_t pid = 0;  // the process's number, and its process group's
    pid_t watcher = 0;
    bool runs = true;
    bool is_to_end = false;  // end() has killed it
    std::thread labels;
  };

  struct Member {
    pid_t group = 0;
    char state = 0;  // the state in /proc/PID/stat
  };

  bool reap();  // tells whether any still run
  std::string name_of(int rank) const;
  void ended(const Child& child, int signal, int code);
  void say_how(int rank, const std::string& how, int signal, const std::string& cause, bool is_lost);
  void end_others();
  void end_leftovers();
  void end_watchers();
  void end_labels();
  void await_signal();  // waits until the next look
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
  struct sigaction on_child_before_ {};  // the action of SIGCHLD in the processes
  std::vector<Child> children_;
  int alive_[2] = {-1, -1};  // a pipe whose end tells the watchers that this process is gone
  int done_[2] = {-1, -1};   // a pipe whose closed end tells the threads of the labels that nothing more will come
  Clock::time_point started_;
  int stop_signal_ = 0;               // the signal that was passed on
  std::atomic<int> labels_{0};        // number of threads of children's labels that run
  std::atomic<bool> hurries_{false};  // true: these threads wait for a slow reader only for a moment
  int first_failure_ = 0;
  std::string first_failure_text_;
  bool failed_ = false;
  bool asked_ = false;                                      // somebody else than the launcher asked the job to end
  Clock::time_point next_step_ = Clock::time_point::max();  // the time of the next step of ending the others
  int next_signal_ = SIGTERM;
};

}  // namespace lockstep::cli
