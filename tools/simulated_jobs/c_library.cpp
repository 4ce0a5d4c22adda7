// The seam: what a program with this file gets in the place of the C library's threads, locks, condition variables,
// clocks, sleeps and environment. Simulated threads get the Scheduler's; all others what the C library has.
//
// std::mutex, std::condition_variable, std::thread and std::chrono end up here, in lockstep as in LibTorch. Calls from
// lockstep's own code are scheduling points; LibTorch's are none, which would only take time.
#include "c_library.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <time.h>

#include "scheduler.hpp"

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <string>

extern "C" {
extern const char __executable_start, etext;  // the linker sets both: this program's code lies between
}

namespace {

using lockstep::simulation::kNever;
using lockstep::simulation::kSecond;
using lockstep::simulation::Process;
using lockstep::simulation::Scheduler;
using lockstep::simulation::Thread;
using lockstep::simulation::Time;

constexpr Time kBoot = 1'000 * kSecond;                // the steady clock's time when a simulation begins
constexpr Time kDate = Time{1'800'000'000} * kSecond;  // and the system's

template <class Function>
Function* next_of(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

Scheduler& scheduler() {
  return *Scheduler::of_this_program();
}

bool is_ours(const void* caller) {
  return caller >= &__executable_start && caller < &etext;
}

void point_if_ours(const void* caller) {
  if (is_ours(caller)) scheduler().point();
}

Time beginning_of(clockid_t clock) {
  return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE ? kDate : kBoot;
}

timespec to_timespec(Time time) {
  return {time / kSecond, time % kSecond};
}

Time from(const timespec& time) {
  return time.tv_sec * kSecond + time.tv_nsec;
}

int lock_next(pthread_mutex_t* mutex) {
  static const auto next = next_of<int(pthread_mutex_t*)>("pthread_mutex_trylock");
  return next(mutex);
}

int unlock_next(pthread_mutex_t* mutex) {
  static const auto next = next_of<int(pthread_mutex_t*)>("pthread_mutex_unlock");
  return next(mutex);
}

int lock(pthread_mutex_t* mutex) {
  for (;;) {
    if (const int result = lock_next(mutex); result != EBUSY) return result;
    scheduler().wait(mutex, kNever);
  }
}

int unlock(pthread_mutex_t* mutex) {
  const int result = unlock_next(mutex);
  scheduler().wake_all(mutex);
  return result;
}

int wait_until(pthread_cond_t* condition, pthread_mutex_t* mutex, Time deadline) {
  unlock(mutex);
  const bool woken = scheduler().wait(condition, deadline);
  lock(mutex);
  return woken ? 0 : ETIMEDOUT;
}

int flock_next(int fd, int operation) {
  static const auto next = next_of<int(int, int)>("flock");
  return next(fd, operation);
}

auto system_fcntl() {
  static const auto next = next_of<int(int, int, ...)>("fcntl");
  return next;
}

auto system_call() {
  static const auto next = next_of<long(long, ...)>("syscall");
  return next;
}

}  // namespace

namespace lockstep::simulation::c_library {

int create(pthread_t* handle, const pthread_attr_t* attributes, void* (*function)(void*), void* argument) {
  static const auto next = next_of<int(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*)>("pthread_create");
  return next(handle, attributes, function, argument);
}

void futex(int* word, int operation, int value) {
  system_call()(SYS_futex, word, operation, value, nullptr, nullptr, 0);
}

void unlock_files(Process& process) {
  struct flock none = {};
  none.l_type = F_UNLCK;
  for (const int fd : process.locks) {
    flock_next(fd, LOCK_UN);
    system_fcntl()(fd, F_OFD_SETLK, &none);
  }
  process.locks.clear();
}

}  // namespace lockstep::simulation::c_library

extern "C" {

int pthread_mutex_lock(pthread_mutex_t* mutex) noexcept {
  if (Scheduler::this_thread() == nullptr) {
    static const auto next = next_of<int(pthread_mutex_t*)>("pthread_mutex_lock");
    return next(mutex);
  }
  point_if_ours(__builtin_return_address(0));
  return lock(mutex);
}

int pthread_mutex_unlock(pthread_mutex_t* mutex) noexcept {
  if (Scheduler::this_thread() == nullptr) return unlock_next(mutex);
  const int result = unlock(mutex);
  point_if_ours(__builtin_return_address(0));
  return result;
}

int pthread_cond_wait(pthread_cond_t* condition, pthread_mutex_t* mutex) {
  if (Scheduler::this_thread() == nullptr) {
    static const auto next = next_of<int(pthread_cond_t*, pthread_mutex_t*)>("pthread_cond_wait");
    return next(condition, mutex);
  }
  return wait_until(condition, mutex, kNever);
}

int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const timespec* time) {
  if (Scheduler::this_thread() == nullptr) {
    static const auto next =
        next_of<int(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*)>("pthread_cond_clockwait");
    return next(condition, mutex, clock, time);
  }
  return wait_until(condition, mutex, from(*time) - beginning_of(clock));
}

int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex, const timespec* time) {
  if (Scheduler::this_thread() == nullptr) {
    static const auto next = next_of<int(pthread_cond_t*, pthread_mutex_t*, const timespec*)>("pthread_cond_timedwait");
    return next(condition, mutex, time);
  }
  return wait_until(condition, mutex, from(*time) - beginning_of(CLOCK_REALTIME));
}

int pthread_cond_signal(pthread_cond_t* condition) noexcept {
  if (Scheduler::this_thread() == nullptr) {
    static const auto next = next_of<int(pthread_cond_t*)>("pthread_cond_signal");
    return next(condition);
  }
  scheduler().wake_one(condition);
  return 0;
}

int pthread_cond_broadcast(pthread_cond_t* condition) noexcept {
  if (Scheduler::this_thread() == nullptr) {
    static const auto next = next_of<int(pthread_cond_t*)>("pthread_cond_broadcast");
    return next(condition);
  }
  scheduler().wake_all(condition);
  return 0;
}

int pthread_create(pthread_t* handle, const pthread_attr_t* attributes, void* (*function)(void*),
                   void* argument) noexcept {
  if (Scheduler::this_thread() == nullptr) {
    return lockstep::simulation::c_library::create(handle, attributes, function, argument);
  }
  return scheduler().create(handle, attributes, [function, argument] { return function(argument); });
}

int pthread_join(pthread_t handle, void** result) {
  static const auto next = next_of<int(pthread_t, void**)>("pthread_join");
  if (Scheduler::this_thread() != nullptr) scheduler().join(handle);
  return next(handle, result);
}

int clock_gettime(clockid_t clock, timespec* time) noexcept {
  if (Scheduler::this_thread() == nullptr) {
    static const auto next = next_of<int(clockid_t, timespec*)>("clock_gettime");
    return next(clock, time);
  }
  // Simulated processes compute nothing.
  const bool of_computing = clock == CLOCK_PROCESS_CPUTIME_ID || clock == CLOCK_THREAD_CPUTIME_ID;
  *time = of_computing ? timespec{} : to_timespec(beginning_of(clock) + scheduler().now());
  return 0;
}

int nanosleep(const timespec* time, timespec* rest) {
  if (Scheduler::this_thread() == nullptr) {
    static const auto next = next_of<int(const timespec*, timespec*)>("nanosleep");
    return next(time, rest);
  }
  scheduler().sleep(from(*time));
  return 0;
}

// The C++ library's headers call it for waits on atomics, as in std::stop_callback's destructor.
long syscall(long number, ...) noexcept {
  va_list list;
  va_start(list, number);
  std::array<long, 6> given{};
  for (long& one : given) one = va_arg(list, long);
  va_end(list);
  const auto [word, flags, value, time, fifth, sixth] = given;
  const long operation = flags & FUTEX_CMD_MASK;
  const bool is_ours = Scheduler::this_thread() != nullptr && number == SYS_futex;
  if (is_ours && operation == FUTEX_WAKE) {
    scheduler().wake_all(reinterpret_cast<void*>(word));
    return 1;
  }
  if (is_ours && operation == FUTEX_WAIT) {
    if (reinterpret_cast<std::atomic<int>*>(word)->load() != value) {
      errno = EAGAIN;
      return -1;
    }
    const auto* const most = reinterpret_cast<const timespec*>(time);
    if (scheduler().wait(reinterpret_cast<void*>(word), most == nullptr ? kNever : scheduler().now() + from(*most)))
      return 0;
    errno = ETIMEDOUT;
    return -1;
  }
  return system_call()(number, word, flags, value, time, fifth, sixth);
}

int sched_yield() noexcept {
  static const auto next = next_of<int()>("sched_yield");
  if (Scheduler::this_thread() == nullptr) return next();
  scheduler().point();
  return 0;
}

// The system's word on threads, such as a wait for a disk, is about the whole program and real time: so hide it.
int openat(int folder, const char* name, int flags, ...) {
  if (Scheduler::this_thread() != nullptr && std::strcmp(name, "/proc/self/task") == 0) {
    errno = ENOENT;
    return -1;
  }
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = (flags & O_CREAT) == 0 ? 0 : va_arg(rest, mode_t);
  va_end(rest);
  static const auto next = next_of<int(int, const char*, int, ...)>("openat");
  return next(folder, name, flags, mode);
}

// Each open() has a lock of its own, so simulated processes keep each other out as real ones do. Only the end of one
// has to be told to the system.
int flock(int fd, int operation) noexcept {
  Thread* const thread = Scheduler::this_thread();
  if (thread != nullptr) scheduler().point();
  const int result = flock_next(fd, operation);
  if (thread != nullptr && result == 0) thread->process->locks.insert(fd);
  return result;
}

// Every command's argument, if it has one, is a number or a pointer.
int fcntl(int fd, int command, ...) {
  va_list arguments;
  va_start(arguments, command);
  void* const argument = va_arg(arguments, void*);
  va_end(arguments);
  Thread* const thread = Scheduler::this_thread();
  const bool locks = thread != nullptr && command == F_OFD_SETLK;
  if (locks) scheduler().point();
  const int result = system_fcntl()(fd, command, argument);
  if (locks && result == 0) thread->process->locks.insert(fd);
  return result;
}

int close(int fd) {
  if (Thread* const thread = Scheduler::this_thread()) thread->process->locks.erase(fd);
  static const auto next = next_of<int(int)>("close");
  return next(fd);
}

char* getenv(const char* name) noexcept {
  if (const Thread* const thread = Scheduler::this_thread()) {
    auto& environment = thread->process->environment;
    if (const auto found = environment.find(name); found != environment.end()) return found->second.data();
  }
  static const auto next = next_of<char*(const char*)>("getenv");
  return next(name);
}

}  // extern "C"

// In the C++ library's shared object, which calls clock_gettime: here it is seen who looks at the clock.
std::chrono::steady_clock::time_point std::chrono::steady_clock::now() noexcept {
  if (Scheduler::this_thread() != nullptr) point_if_ours(__builtin_return_address(0));
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time_point(nanoseconds(from(time)));
}
