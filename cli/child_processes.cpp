#include "child_processes.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <lockstep/base/error.hpp>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <sstream>
#include <utility>

#include "base/exception_text.hpp"
#include "base/seconds_since.hpp"
#include "base/signals.hpp"
#include "base/start_thread.hpp"
#include "io/process_stat.hpp"
#include "io/reason.hpp"
#include "output.hpp"
#include "text.hpp"

namespace lockstep::cli {

namespace {

using namespace std::chrono_literals;

constexpr size_t pipe_size = 64 << 10;  // the capacity of a pipe
constexpr auto kBetweenLooks = 100ms;

std::vector<char*> pointers(std::vector<std::string>& words) {
  std::vector<char*> result;
  result.reserve(words.size() + 1);
  for (auto& word : words) result.push_back(word.data());
  result.push_back(nullptr);
  return result;
}

std::vector<std::string> environment_with(const std::vector<std::string>& variables) {
  std::vector<std::string> all = variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const std::string name = text.substr(0, text.find('=') + 1);
    const auto is_set = [&](const std::string& variable) { return variable.starts_with(name); };
    if (!std::any_of(variables.begin(), variables.end(), is_set)) all.push_back(text);
  }
  return all;
}

// Between fork() and exec(), a copy of a program with threads may only make system calls.
[[noreturn]] void become(char** words, char** environment, const sigset_t& mask, const struct sigaction& on_child,
                         bool reads_input, int output, int error_pipe, const int (&ready)[2], pid_t parent) {
  setpgid(0, 0);                        // Ctrl-C then reaches the child once: through the launcher
  prctl(PR_SET_PDEATHSIG, SIGTERM);     // comes if the launcher is killed; watch() also ends descendants
  if (getppid() != parent) _exit(127);  // the launcher is gone already
  signal(SIGPIPE, SIG_DFL);
  sigaction(SIGCHLD, &on_child, nullptr);
  if (!reads_input || isatty(STDIN_FILENO)) {  // a process in the background must not read the terminal
    const int nothing = open("/dev/null", O_RDONLY);
    dup2(nothing, STDIN_FILENO);
  }
  if (output >= 0) {
    dup2(output, STDOUT_FILENO);
    dup2(output, STDERR_FILENO);
  }
  close(ready[1]);
  char nothing = 0;
  while (read(ready[0], &nothing, 1) < 0) {  // waits until the group has its watcher
  }
  sigprocmask(SIG_SETMASK, &mask, nullptr);
  execvpe(words[0], words, environment);
  const int error = errno;
  [[maybe_unused]] const ssize_t written = write(error_pipe, &error, sizeof error);
  _exit(127);
}

// Tells whether this process is its group's last one. It leaves the group to ask.
bool is_alone_in(pid_t group) {
  setpgid(0, 0);
  return (kill(-group, 0) != 0 && errno == ESRCH) || setpgid(0, group) != 0;
}

// PR_SET_PDEATHSIG ends a process with the launcher, but not the process's descendants. So each group has a watcher,
// which ends the group once nobody holds the other end of `alive` any more. The watcher is a member of the group, so
// that the group's number cannot be given to others. Like become() it may only make system calls.
[[noreturn]] void watch(pid_t group, int alive, std::chrono::milliseconds until_kill) {
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, nullptr);
  if (setpgid(0, group) != 0) _exit(1);  // nobody is in the group any more
  dup2(alive, STDIN_FILENO);             // the watcher must keep nothing else open: no output, no port
  if (syscall(SYS_close_range, 1, ~0U, 0) != 0) {
    for (int fd = 1; fd < sysconf(_SC_OPEN_MAX); ++fd) close(fd);
  }
  char nothing = 0;
  while (read(STDIN_FILENO, &nothing, 1) < 0) {
  }
  kill(0, SIGTERM);
  constexpr auto between_looks = 20ms;
  for (auto waited = 0ms; waited < until_kill && !is_alone_in(group); waited += between_looks) {
    const timespec pause{0, std::chrono::nanoseconds(between_looks).count()};
    nanosleep(&pause, nullptr);
  }
  kill(0, SIGKILL);
  _exit(0);
}

void end_watcher(pid_t watcher) {
  if (watcher <= 0) return;
  kill(watcher, SIGKILL);
  waitpid(watcher, nullptr, 0);
}

// Waits until the reader has taken all. Gives false if the job is to end, and the reader did not take all within a
// second.
bool is_taken(Output& output, const std::atomic<bool>& hurries) {
  for (int looks = 0; !output.finish(100ms); looks += hurries ? 1 : 0) {
    if (looks == 10) return false;
  }
  return true;
}

// Copies whole lines, each with a label, until the pipe's end. If an unknown process keeps the pipe open, copying stops
// when all processes are done. Reads no more than there is room to write. If the reader is gone, closes the pipe too,
// and the process ends as without labels. Gives the number of the error with which a write failed, or 0.
int copy_with_label(int fd, int done, const std::atomic<bool>& hurries, const std::string& label) {
  Output output(STDOUT_FILENO);
  bool is_read = true;
  const auto print = [&](const std::string& line) {
    if (!is_read) return;
    output.print(line);
    is_read = is_taken(output, hurries);
    if (!is_read) output.give_up();
  };
  std::string rest;
  std::vector<char> buffer(pipe_size);
  for (bool last = false; !last && !output.failed();) {
    pollfd polled[] = {{fd, POLLIN, 0}, {done, POLLIN, 0}};
    if (poll(polled, 2, -1) < 0) continue;
    last = polled[1].revents != 0;
    const ssize_t size = read(fd, buffer.data(), buffer.size());
    last = last || size == 0;
    if (size <= 0) continue;
    rest.append(buffer.data(), static_cast<size_t>(size));
    for (size_t end = 0; (end = rest.find('\n')) != std::string::npos; rest.erase(0, end + 1)) {
      print(label + rest.substr(0, end + 1));
    }
  }
  if (!rest.empty()) print(label + rest + "\n");
  close(fd);
  return output.error();
}

// Tells whether this is the exit code of a program that stopped because a signal asked it to.
bool tells_of_request(int code) {
  return code == 128 + SIGHUP || code == 128 + SIGINT || code == 128 + SIGTERM;
}

// Gives the likely cause of a SIGKILL, to add to the text that it came.
std::string want_of_memory() {
  return ", probably by the kernel for want of memory, the machine's or a container's (less is needed " +
         what_needs_less_memory("this machine") + ")";
}

// Gives advice to add to "No such file or directory".
std::string where_to_look(const std::string& program) {
  if (program.find('/') != std::string::npos) return "";
  const bool is_here = access(("./" + program).c_str(), X_OK) == 0;
  return " in the folders of PATH" + (is_here ? "; did you mean ./" + program + "?" : "");
}

}  // namespace

ChildProcesses::ChildProcesses(Options options, LaunchMessages& messages)
    : options_(std::move(options)), messages_(messages), started_(Clock::now()) {
  if (pipe2(alive_, O_CLOEXEC) != 0 || (options_.label && pipe2(done_, O_CLOEXEC) != 0)) {
    throw Error("cannot make a pipe: " + io::reason(errno), {Error::machine});
  }
  struct sigaction keeps_children {};  // if SIGCHLD is ignored, the system forgets how children ended
  sigaction(SIGCHLD, &keeps_children, &on_child_before_);
  sigemptyset(&awaited_);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCHLD}) {
    if (!is_ignored(signal)) sigaddset(&awaited_, signal);  // an ignored signal stays ignored in the processes too
  }
  pthread_sigmask(SIG_BLOCK, &awaited_, &mask_before_);
}

ChildProcesses::~ChildProcesses() {
  send(SIGKILL);
  end_watchers();
  for (const auto& child : children_) waitpid(child.pid, nullptr, 0);
  hurries_ = true;
  end_labels();
  for (const int fd : alive_) close(fd);
  sigaction(SIGCHLD, &on_child_before_, nullptr);
  pthread_sigmask(SIG_SETMASK, &mask_before_, nullptr);
}

void ChildProcesses::start(const std::vector<std::string>& words, const std::vector<std::string>& variables,
                           int number) {
  auto argument_texts = words, variable_texts = environment_with(variables);
  auto arguments = pointers(argument_texts), environment = pointers(variable_texts);
  const bool reads_input = children_.empty();
  int errors[2] = {-1, -1}, ready[2] = {-1, -1}, output[2] = {-1, -1};
  if (pipe2(errors, O_CLOEXEC) != 0 || pipe2(ready, O_CLOEXEC) != 0 ||
      (options_.label && pipe2(output, O_CLOEXEC) != 0)) {
    throw Error("cannot make a pipe: " + io::reason(errno), {Error::machine});
  }
  const pid_t launcher = getpid();
  const pid_t pid = fork();
  if (pid == 0) {
    become(arguments.data(), environment.data(), mask_before_, on_child_before_, reads_input, output[1], errors[1],
           ready, launcher);
  }
  if (pid > 0) setpgid(pid, pid);
  const pid_t watcher = pid > 0 ? fork() : -1;
  if (watcher == 0) watch(pid, alive_[0], options_.until_term_when_stopped);
  const int fork_error = watcher < 0 ? errno : 0;
  if (pid > 0 && watcher < 0) kill(pid, SIGKILL);
  close(ready[0]);
  close(ready[1]);
  close(errors[1]);
  if (output[1] >= 0) close(output[1]);
  int error = fork_error;
  if (watcher > 0 && read(errors[0], &error, sizeof error) != sizeof error) error = 0;
  close(errors[0]);
  if (error != 0) {
    if (pid > 0) waitpid(pid, nullptr, 0);
    end_watcher(watcher);
    if (output[0] >= 0) close(output[0]);
    throw Error(
        "cannot start " + words[0] + ": " + io::reason(error) + (error == ENOENT ? where_to_look(words[0]) : ""),
        {Error::machine});
  }
  auto& child = children_.emplace_back();
  child.number = number;
  child.pid = pid;
  child.watcher = watcher;
  if (options_.label) {
    fcntl(output[0], F_SETFL, O_NONBLOCK);
    ++labels_;
    child.labels = start_thread([this, from = output[0], done = done_[0], label = format("[%d] ", number)] {
      const int error = copy_with_label(from, done, hurries_, label);
      if (error != 0 && error != EPIPE) messages_.say("cannot write to the standard output: " + io::reason(error));
      --labels_;
    });
  }
}

// The system may give a process's number to another process once it is free. A child that has ended keeps its number,
// and the group's, because nobody collects children before the end.
void ChildProcesses::send(int signal) const {
  for (const auto& child : children_) kill(-child.pid, signal);
}

// Gives the members of the children's groups that have not ended.
std::vector<ChildProcesses::Member> ChildProcesses::members() const {
  std::vector<Member> members;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    std::istringstream fields(io::stat_after_name(entry.path()));
    Member member;
    pid_t parent = 0;
    fields >> member.state >> parent >> member.group;
    const auto is_group = [&](const Child& child) { return child.pid == member.group; };
    if (fields && member.state != 'Z' && std::any_of(children_.begin(), children_.end(), is_group)) {
      members.push_back(member);
    }
  }
  return members;
}

void ChildProcesses::await_signal() {
  messages_.say_what_is_kept();
  const timespec pause{0, std::chrono::nanoseconds(kBetweenLooks).count()};
  const int signal = sigtimedwait(&awaited_, nullptr, &pause);
  if (signal == SIGTSTP) {
    stand_still();
  } else if (signal > 0 && signal != SIGCHLD) {
    pass_on(signal);
  }
}

ChildProcesses::Ending ChildProcesses::wait() {
  for (;;) {
    const bool some_run = reap(), nothing_ends = next_step_ == Clock::time_point::max();
    const bool has_started_one = nothing_ends && options_.look && options_.look();
    if (!some_run && !has_started_one) break;
    if (Clock::now() >= next_step_) end_others();
    await_signal();
  }
  end_watchers();
  end_leftovers();
  end_labels();
  for (const auto& child : children_) waitpid(child.pid, nullptr, 0);
  children_.clear();  // their numbers may belong to other processes now
  return {first_failure_, failed_, /*by_request=*/stop_signal_ != 0 || asked_, first_failure_text_};
}

void ChildProcesses::end(int rank) {
  for (auto& child : children_) {
    if (child.number != rank || !child.runs) continue;
    child.is_to_end = true;
    kill(-child.pid, SIGKILL);
  }
}

void ChildProcesses::pass_on(int signal) {
  send(signal);
  if (signal == SIGUSR1 || signal == SIGUSR2) return;
  stop_signal_ = signal;
  hurries_ = true;
  const auto runs = [](const Child& child) { return child.runs; };
  if (first_failure_ == 0 && std::none_of(children_.begin(), children_.end(), runs)) first_failure_ = 128 + signal;
  if (next_step_ == Clock::time_point::max()) next_step_ = Clock::now() + options_.until_term_when_stopped;
}

// The terminal's Ctrl-Z reaches only this process, and its children would go on. This process sends them SIGSTOP,
// because a process may ignore SIGTSTP.
void ChildProcesses::stand_still() {
  const auto begin = Clock::now();
  send(SIGSTOP);
  raise(SIGSTOP);  // stands still until SIGCONT: a shell's fg or bg
  send(SIGCONT);
  if (next_step_ != Clock::time_point::max()) next_step_ += Clock::now() - begin;
}

void ChildProcesses::end_others() {
  if (next_signal_ == SIGTERM) {
    say_who_stands_still();
    messages_.say("ending the others");
  }
  send(std::exchange(next_signal_, SIGKILL));
  next_step_ = Clock::now() + options_.until_kill;
}

// Tells of processes that a signal has stopped, since these are as silent as dead ones to the others.
void ChildProcesses::say_who_stands_still() const {
  const auto all = members();
  for (const auto& child : children_) {
    const auto is_stopped = [&](const Member& member) {
      return member.group == child.pid && (member.state == 'T' || member.state == 't');
    };
    if (std::any_of(all.begin(), all.end(), is_stopped)) {
      messages_.say(name_of(child.number) + " did not crash: a signal or a debugger has stopped it");
    }
  }
}

// Ends processes that the children started and did not wait for.
void ChildProcesses::end_leftovers() {
  for (const auto& [signal, patience] : {std::pair(0, 200ms), std::pair(SIGTERM, 1000ms), std::pair(SIGKILL, 0ms)}) {
    if (members().empty()) return;
    send(signal);
    const auto deadline = Clock::now() + patience;
    while (Clock::now() < deadline && !members().empty()) std::this_thread::sleep_for(10ms);
  }
}

void ChildProcesses::end_watchers() {
  for (auto& child : children_) end_watcher(std::exchange(child.watcher, 0));
}

void ChildProcesses::end_labels() {
  if (done_[1] >= 0) close(std::exchange(done_[1], -1));
  while (labels_ > 0 && !hurries_) await_signal();  // the labels' threads wait for the reader
  for (auto& child : children_) {
    if (child.labels.joinable()) child.labels.join();
  }
  if (done_[0] >= 0) close(std::exchange(done_[0], -1));
}

bool ChildProcesses::reap() {
  bool running = false;
  for (auto& child : children_) {
    siginfo_t info{};
    if (child.runs && waitid(P_PID, child.pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == child.pid) {
      child.runs = false;
      ended(child, info.si_code == CLD_EXITED ? 0 : info.si_status,
            info.si_code == CLD_EXITED ? info.si_status : 128 + info.si_status);
    }
    running = running || child.runs;
  }
  return running;
}

void ChildProcesses::ended(const Child& child, int signal, int code) {
  const int rank = child.number;
  const bool asked = signal == 0 && stop_signal_ == 0 && !others_are_ended() && tells_of_request(code);
  const bool stopped = asked || (stop_signal_ != 0 && code == 128 + stop_signal_);
  const bool nothing_ends = next_step_ == Clock::time_point::max();
  // A shell ends with the same code if a process that it started is killed.
  const bool lacked_memory = code == 128 + SIGKILL && nothing_ends && !child.is_to_end && memory_kills_.take();
  const std::string cause = lacked_memory ? want_of_memory() : "";
  const std::string how_it_ended = signal != 0 ? format("was ended by signal %d (%s)", signal, strsignal(signal))
                                               : format("ended with exit code %d", code);
  bool others_go_on = false;
  if (options_.on_end) {
    const std::string how = stopped ? "stopped by request" : "it " + how_it_ended + cause;
    const bool killed = signal != 0 && nothing_ends;
    others_go_on = options_.on_end(rank, {code != 0, stopped, killed, how, lacked_memory});
  }
  if (code == 0) return;
  const bool others_run =
      std::any_of(children_.begin(), children_.end(), [](const Child& child) { return child.runs; });
  if (asked && first_failure_ == 0) {
    messages_.say(name_of(rank) +
                  format(" stopped on request (exit code %d) after %.1f s", code, seconds_since(started_)));
  }
  if (!stopped) say_how(rank, how_it_ended, signal, cause, others_go_on && others_run);
  if (!stopped && !failed_ && !others_go_on && others_run) first_failure_text_ = name_of(rank) + " " + how_it_ended;
  failed_ = failed_ || !others_go_on;
  asked_ = asked_ || asked;
  const bool forced = stop_signal_ != 0 && others_are_ended() && (signal == SIGTERM || signal == SIGKILL);
  if (first_failure_ == 0 && !others_go_on) first_failure_ = forced ? 128 + stop_signal_ : code;
  if (next_step_ != Clock::time_point::max() || (others_go_on && !stopped)) return;
  next_step_ = Clock::now() + (stopped ? options_.until_term_when_stopped : options_.until_term);
}

std::string ChildProcesses::name_of(int rank) const {
  return options_.name + " " + std::to_string(rank);
}

// The first failure tells most. Later failures mostly follow from the first, and are reported only if no other report
// explains them.
void ChildProcesses::say_how(int rank, const std::string& how, int signal, const std::string& cause, bool is_lost) {
  const bool is_by_itself = signal != 0 && !(others_are_ended() && signal == SIGTERM);
  if (others_are_ended() && signal == SIGKILL) {
    messages_.say(name_of(rank) + " did not end, so it was killed");
  } else if (is_by_itself || is_lost || first_failure_ == 0 || next_step_ == Clock::time_point::max()) {
    messages_.say(name_of(rank) + " " + how + format(" after %.1f s", seconds_since(started_)) + cause +
                  (is_lost ? "; the others go on without it" : ""));
  }
}

}  // namespace lockstep::cli
