// A library to preload (LD_PRELOAD): a connect() to an address of the network that goes wrong.
//
// FAULT_TO    "store": counts the connections to MASTER_PORT of the process with RANK=$FAULT_RANK;
//             "ranks": those to any other port, of all processes, since Gloo picks the one of two that connects
// FAULT_AT    the number of the connection at which the fault comes, see fault.hpp
// FAULT_FILE  is made at that moment, and holds the RANK of the process
// There the process kills itself, or sleeps for FAULT_MILLISECONDS if that is set. FAULT_ERROR, in place of all these,
// is the number of an error. Each connection of a process without a RANK then fails with it.
#include "fault.hpp"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <time.h>

#include <cerrno>

namespace {

using fault::variable;

int port_of(const sockaddr* address) {
  return ntohs(address->sa_family == AF_INET ? reinterpret_cast<const sockaddr_in*>(address)->sin_port
                                             : reinterpret_cast<const sockaddr_in6*>(address)->sin6_port);
}

bool is_time(const sockaddr* address) {
  const std::string rank = variable("RANK"), to = variable("FAULT_TO");
  if (rank.empty() || to.empty()) return false;
  const bool to_store = std::to_string(port_of(address)) == variable("MASTER_PORT");
  if (to_store != (to == "store") || (to_store && rank != variable("FAULT_RANK"))) return false;
  return fault::is_time();
}

void fail() {
  const std::string rank = variable("RANK"), milliseconds = variable("FAULT_MILLISECONDS");
  const int file = open(variable("FAULT_FILE").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  [[maybe_unused]] const ssize_t written = write(file, rank.data(), rank.size());
  close(file);
  if (milliseconds.empty()) fault::die();
  const long time = std::atol(milliseconds.c_str());
  const timespec pause{time / 1000, time % 1000 * 1'000'000};
  nanosleep(&pause, nullptr);
}

}  // namespace

extern "C" int connect(int socket, const sockaddr* address, socklen_t size) {
  using Connect = int (*)(int, const sockaddr*, socklen_t);
  static const auto real = reinterpret_cast<Connect>(dlsym(RTLD_NEXT, "connect"));
  if (address->sa_family == AF_INET || address->sa_family == AF_INET6) {
    const std::string error = variable("FAULT_ERROR");
    if (!error.empty() && variable("RANK").empty()) {
      errno = std::atoi(error.c_str());
      return -1;
    }
    if (is_time(address)) fail();
  }
  return real(socket, address, size);
}
