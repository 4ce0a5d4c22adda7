// SignalBlocked: while it lives, a call of this thread that fails with a signal fails without it, and does not end the
// process. SIGPIPE: a write to a connection that the peer has closed. Gloo writes without MSG_NOSIGNAL, in the thread
// that calls it and in threads of its own, which inherit the mask of the thread that starts them. SIGXFSZ: a write
// beyond the limit on the size of files. For one thread each; four system calls. errno stays.
#pragma once

#include <cerrno>
#include <csignal>
#include <ctime>

namespace lockstep {

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

  // A signal that came meanwhile is this thread's own, and is taken away before it can be delivered.
  ~SignalBlocked() {
    if (sigismember(&before_, signal_) == 1) return;
    const int error = errno;
    const timespec at_once{};
    if (!was_pending_) sigtimedwait(&alone_, nullptr, &at_once);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    errno = error;
  }

  SignalBlocked(const SignalBlocked&) = delete;
  SignalBlocked& operator=(const SignalBlocked&) = delete;

 private:
  const int signal_;
  sigset_t alone_{}, before_{};
  bool was_pending_ = false;
};

}  // namespace lockstep
