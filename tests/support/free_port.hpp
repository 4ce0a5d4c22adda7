// Ports for tests that must name one before somebody listens there.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace lockstep {

// A port, at all of this machine's addresses, that is this test's until its process ends; each time another one. The
// system chooses the port, and gives it to nobody else as long as the socket here lives. That socket does not listen
// and, as a job's store does, lets others take the same port, so that the store can.
inline std::string free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int yes = 1;
  sockaddr_in address{};
  socklen_t size = sizeof address;
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) != 0 ||
      bind(fd, generic, sizeof address) != 0 || getsockname(fd, generic, &size) != 0)
    throw std::runtime_error("no port is free: " + std::string(std::strerror(errno)));
  return std::to_string(ntohs(address.sin_port));
}

}  // namespace lockstep
