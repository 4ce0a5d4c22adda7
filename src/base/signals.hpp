// Asks whether a process ignores a signal, and blocks one.
#pragma once

#include <cerrno>
#include <csignal>
#include <ctime>

namespace lockstep {

// Tells whether this process ignores the signal. nohup starts such processes, and so does a script in the background.
// An ignored signal that is blocked and awaited would come all the same.
inline bool is_ignored(int signal) {
  struct sigaction action {};
  return sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

// While a SignalBlocked lives, a system call of this thread that would raise the signal only fails; the process goes
// on.
// SIGPIPE  a write to a connection that the peer has closed. Gloo writes without MSG_NOSIGNAL, in the calling thread
// and in threads of its own, which inherit the calling thread's mask. SIGXFSZ  a write beyond the limit on the size of
// files. SignalBlocked acts on one thread and one signal, costs four system calls, and leaves errno alone.
class SignalBlocked {
 public:
  explicit SignalBlocked(int signal) : signal_(signal) {
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, signal) == 1;
    sigemptyset(&alone_);
    sigaddset(&alone_, signal);
    pthread_sigmask(SIG_BLOCK, &alone_, &before_);
  }

  // Takes away a signal that came meanwhile: this thread's own call raised it.
  ~SignalBlocked() {
    if (sigismember(&before_, signal_) == 1) return;
    const int error = errno;
    const timespec at_once{};
    if (!was_pending_) sigtimedwait(&alone_, nullptr, &at_once);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    errno = error;
  }

  SignalBlocked& operator=(SignalBlocked&&) = delete;

 private:
  const int signal_;
  sigset_t alone_{}, before_{};
  bool was_pending_ = false;
};

}  // namespace lockstep
