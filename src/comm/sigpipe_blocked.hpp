// SigpipeBlocked: while it lives, a write of this thread to a connection that the peer has closed fails, and does not
// end the process. Gloo writes without MSG_NOSIGNAL, in the thread that calls it and in threads of its own, which
// inherit the mask of the thread that starts them. For one thread each; four system calls.
#pragma once

#include <csignal>
#include <ctime>

namespace lockstep::comm {

class SigpipeBlocked {
 public:
  SigpipeBlocked() {
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    sigemptyset(&sigpipe_);
    sigaddset(&sigpipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &sigpipe_, &before_);
  }

  // A signal that came meanwhile is this thread's own, and is taken away before it can be delivered.
  ~SigpipeBlocked() {
    if (sigismember(&before_, SIGPIPE) == 1) return;
    const timespec at_once{};
    if (!was_pending_) sigtimedwait(&sigpipe_, nullptr, &at_once);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

  SigpipeBlocked(const SigpipeBlocked&) = delete;
  SigpipeBlocked& operator=(const SigpipeBlocked&) = delete;

 private:
  sigset_t sigpipe_{}, before_{};
  bool was_pending_ = false;
};

}  // namespace lockstep::comm
