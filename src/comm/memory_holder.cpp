#include "memory_holder.hpp"

#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <ctime>

namespace lockstep::comm {
namespace {

// ThreadSanitizer's clone() runs code of its own in the second process.
#if defined(__SANITIZE_THREAD__)  // GCC
#define LOCKSTEP_HAS_MEMORY_HOLDER 0
#elif defined(__has_feature)  // clang
#define LOCKSTEP_HAS_MEMORY_HOLDER !__has_feature(thread_sanitizer)
#else
#define LOCKSTEP_HAS_MEMORY_HOLDER 1
#endif

#if LOCKSTEP_HAS_MEMORY_HOLDER && (defined(__x86_64__) || defined(__aarch64__))

constexpr size_t kStackSize = 16 << 10;
constexpr timespec kUntilAllThreadsEnded{0, 100'000'000};
constexpr int kParentIsGone = 63;  // a signal that nobody sends, also not to the whole group of processes

// A system call as the processor knows it: < 0 for an error. The C library's would touch variables of the thread whose
// copy the second process is, such as errno.
__attribute__((always_inline)) inline long system_call(long number, long a = 0, long b = 0, long c = 0, long d = 0) {
#if defined(__x86_64__)
  register long fourth asm("r10") = d;
  asm volatile("syscall" : "+a"(number) : "D"(a), "S"(b), "d"(c), "r"(fourth) : "rcx", "r11", "memory");
  return number;
#else
  register long which asm("x8") = number, first asm("x0") = a, second asm("x1") = b, third asm("x2") = c,
                      fourth asm("x3") = d;
  asm volatile("svc 0" : "+r"(first) : "r"(which), "r"(second), "r"(third), "r"(fourth) : "memory");
  return first;
#endif
}

// The second process. It has the memory of the first, and the thread-local variables of the thread that made it. So it
// makes system calls and does nothing else, and no sanitizer may take it for that thread.
__attribute__((no_sanitize("address", "undefined"))) int hold_memory(void* parent) {
  system_call(SYS_prctl, PR_SET_NAME, reinterpret_cast<long>("lockstep-memory"));
  system_call(SYS_prctl, PR_SET_PDEATHSIG, kParentIsGone);
  const bool is_late = system_call(SYS_getppid) != *static_cast<const pid_t*>(parent);
  if (system_call(SYS_close_range, 0, ~0U) == 0 && !is_late) {
    const uint64_t awaited = uint64_t{1} << (kParentIsGone - 1);  // the kernel's own form of a set of signals
    while (system_call(SYS_rt_sigtimedwait, reinterpret_cast<long>(&awaited), 0, 0, sizeof awaited) != kParentIsGone) {
    }
    system_call(SYS_nanosleep, reinterpret_cast<long>(&kUntilAllThreadsEnded));
  }
  for (;;) system_call(SYS_exit_group);
}

}  // namespace

MemoryHolder::MemoryHolder() : stack_(std::make_unique<std::byte[]>(kStackSize)) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // the process inherits this: no handler runs in it
  process_ = clone(hold_memory, stack_.get() + kStackSize, CLONE_VM, &parent_);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

#else

}  // namespace

MemoryHolder::MemoryHolder() = default;

#endif

MemoryHolder::~MemoryHolder() {
  if (process_ < 0) return;
  kill(process_, SIGKILL);
  while (waitpid(process_, nullptr, __WALL) < 0 && errno == EINTR) {
  }
}

}  // namespace lockstep::comm
