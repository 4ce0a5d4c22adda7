// A library to preload (LD_PRELOAD): connect(), which in the process with RANK=$FAULT_RANK fails at its n-th call to
// another address, n = $FAULT_AT. There the process kills itself, or sleeps for $FAULT_MILLISECONDS if that is set. The
// file $FAULT_FILE is made at that moment.
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace {

bool is_time() {
  static std::atomic<int> calls{0};
  const char *const rank = std::getenv("RANK"), *const victim = std::getenv("FAULT_RANK");
  const char* const number = std::getenv("FAULT_AT");
  if (rank == nullptr || victim == nullptr || number == nullptr || std::strcmp(rank, victim) != 0) return false;
  return ++calls == std::atoi(number);
}

void fail() {
  const char* const file = std::getenv("FAULT_FILE");
  if (file != nullptr) close(open(file, O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  const char* const milliseconds = std::getenv("FAULT_MILLISECONDS");
  if (milliseconds == nullptr) kill(getpid(), SIGKILL);
  const long time = milliseconds == nullptr ? 0 : std::atol(milliseconds);
  const timespec pause{time / 1000, time % 1000 * 1'000'000};
  nanosleep(&pause, nullptr);
}

}  // namespace

extern "C" int connect(int socket, const sockaddr* address, socklen_t size) {
  using Connect = int (*)(int, const sockaddr*, socklen_t);
  static const auto real = reinterpret_cast<Connect>(dlsym(RTLD_NEXT, "connect"));
  if ((address->sa_family == AF_INET || address->sa_family == AF_INET6) && is_time()) fail();
  return real(socket, address, size);
}
