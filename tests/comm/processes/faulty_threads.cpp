// A library to preload (LD_PRELOAD): the process with RANK=$FAULT_RANK may have FAULT_THREADS threads beside its first
// one. pthread_create() fails beyond, as at the limit of a user.
#include "fault.hpp"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>

namespace {

std::atomic<int> living{0};

struct Start {
  void* (*work)(void*);
  void* argument;
};

void* run(void* given) {
  const Start start = *static_cast<Start*>(given);
  delete static_cast<Start*>(given);
  void* const result = start.work(start.argument);
  --living;
  return result;
}

}  // namespace

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*work)(void*),
                              void* argument) {
  static const auto real = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  const std::string rank = fault::variable("FAULT_RANK");
  if (rank.empty() || rank != fault::variable("RANK")) return real(thread, attributes, work, argument);
  if (++living > std::atoi(fault::variable("FAULT_THREADS").c_str())) {
    --living;
    return EAGAIN;
  }
  return real(thread, attributes, run, new Start{work, argument});
}
