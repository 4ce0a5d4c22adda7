#include "child_processes.hpp"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <lockstep/error.hpp>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <utility>

#include "output.hpp"
#include "text.hpp"

namespace lockstep::cli {

namespace {

using namespace std::chrono_literals;

constexpr auto kill_after = 5s;

void say(const std::string& text) {
  Output(STDERR_FILENO).print("lockstep launch: " + text + "\n");
}

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

// Between fork() and exec() a copy of a program with threads may make system calls only.
[[noreturn]] void become(char** words, char** environment, const sigset_t& mask, bool reads_input, int output,
                         int error_pipe, pid_t parent) {
  setpgid(0, 0);                        // so that Ctrl-C reaches it once: through the launcher
  prctl(PR_SET_PDEATHSIG, SIGTERM);     // nobody else would end it if the launcher was killed
  if (getppid() != parent) _exit(127);  // it already was
  signal(SIGPIPE, SIG_DFL);
  if (!reads_input || isatty(STDIN_FILENO)) {  // a process in the background must not read the terminal
    const int nothing = open("/dev/null", O_RDONLY);
    dup2(nothing, STDIN_FILENO);
  }
  if (output >= 0) {
    dup2(output, STDOUT_FILENO);
    dup2(output, STDERR_FILENO);
  }
  sigprocmask(SIG_SETMASK, &mask, nullptr);
  execvpe(words[0], words, environment);
  const int error = errno;
  [[maybe_unused]] const ssize_t written = write(error_pipe, &error, sizeof error);
  _exit(127);
}

// Copies whole lines, each with a label.
void copy_with_label(int fd, const std::string& label) {
  Output output(STDOUT_FILENO);
  std::string rest;
  char buffer[4096];
  for (ssize_t size = 0; (size = read(fd, buffer, sizeof buffer)) > 0 || (size < 0 && errno == EINTR);) {
    if (size < 0) continue;
    rest.append(buffer, static_cast<size_t>(size));
    for (size_t end = 0; (end = rest.find('\n')) != std::string::npos; rest.erase(0, end + 1)) {
      output.print(label + rest.substr(0, end + 1));
    }
  }
  if (!rest.empty()) output.print(label + rest + "\n");
  close(fd);
}

}  // namespace

ChildProcesses::ChildProcesses(Options options) : options_(options), started_(Clock::now()) {
  sigemptyset(&awaited_);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGCHLD}) sigaddset(&awaited_, signal);
  pthread_sigmask(SIG_BLOCK, &awaited_, &mask_before_);
}

ChildProcesses::~ChildProcesses() {
  send(SIGKILL);
  for (auto& child : children_) {
    if (child.pid != 0) waitpid(child.pid, nullptr, 0);
    if (child.labels.joinable()) child.labels.join();
  }
  pthread_sigmask(SIG_SETMASK, &mask_before_, nullptr);
}

void ChildProcesses::start(const std::vector<std::string>& words, const std::vector<std::string>& variables) {
  auto argument_texts = words, variable_texts = environment_with(variables);
  auto arguments = pointers(argument_texts), environment = pointers(variable_texts);
  const bool reads_input = children_.empty();
  int errors[2] = {-1, -1}, output[2] = {-1, -1};
  if (pipe2(errors, O_CLOEXEC) != 0 || (options_.label && pipe2(output, O_CLOEXEC) != 0)) {
    throw Error(std::string("cannot make a pipe: ") + std::strerror(errno));
  }
  const pid_t launcher = getpid();
  const pid_t pid = fork();
  if (pid == 0) {
    become(arguments.data(), environment.data(), mask_before_, reads_input, output[1], errors[1], launcher);
  }
  const int fork_error = pid < 0 ? errno : 0;
  close(errors[1]);
  if (output[1] >= 0) close(output[1]);
  int error = fork_error;
  if (pid > 0 && read(errors[0], &error, sizeof error) != sizeof error) error = 0;
  close(errors[0]);
  if (error != 0) {
    if (pid > 0) waitpid(pid, nullptr, 0);
    if (output[0] >= 0) close(output[0]);
    throw Error("cannot start " + words[0] + ": " + std::strerror(error));
  }
  auto& child = children_.emplace_back();
  child.pid = pid;
  if (options_.label) {
    child.labels = std::thread(copy_with_label, output[0], format("[%zu] ", children_.size() - 1));
  }
}

void ChildProcesses::send(int signal) const {
  for (const auto& child : children_) {
    if (child.pid != 0) kill(-child.pid, signal);
  }
}

int ChildProcesses::wait(std::chrono::milliseconds grace) {
  while (reap()) {
    if (first_failure_ != 0 && next_step_ == Clock::time_point::max()) next_step_ = Clock::now() + grace;
    if (Clock::now() >= next_step_) end_others();
    const timespec pause{0, 100'000'000};
    const int signal = sigtimedwait(&awaited_, nullptr, &pause);
    if (signal > 0 && signal != SIGCHLD) send(signal);
  }
  for (auto& child : children_) {
    if (child.labels.joinable()) child.labels.join();
  }
  return first_failure_;
}

void ChildProcesses::end_others() {
  if (next_signal_ == SIGTERM) say("ending the others");
  send(std::exchange(next_signal_, SIGKILL));
  next_step_ = Clock::now() + kill_after;
}

bool ChildProcesses::reap() {
  bool running = false;
  for (size_t rank = 0; rank < children_.size(); ++rank) {
    Child& child = children_[rank];
    int status = 0;
    if (child.pid != 0 && waitpid(child.pid, &status, WNOHANG) == child.pid) {
      child.pid = 0;
      ended(static_cast<int>(rank), status);
    }
    running = running || child.pid != 0;
  }
  return running;
}

void ChildProcesses::ended(int rank, int status) {
  const int signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  const int code = signal != 0 ? 128 + signal : WEXITSTATUS(status);
  if (code == 0) return;
  const double seconds = std::chrono::duration<double>(Clock::now() - started_).count();
  say("rank " + std::to_string(rank) +
      (signal != 0 ? format(" was ended by signal %d (%s)", signal, strsignal(signal))
                   : format(" ended with exit code %d", code)) +
      format(" after %.1f s", seconds));
  if (first_failure_ == 0) first_failure_ = code;
}

}  // namespace lockstep::cli
