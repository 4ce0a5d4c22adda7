#include "sockets.hpp"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <lockstep/base/error.hpp>

#include "io/reason.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

namespace lockstep::comm {
namespace {

using io::reason;

struct Address {
  sockaddr_storage storage{};
  socklen_t size = 0;
  int port() const {
    return ntohs(storage.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port
                                               : reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
  }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  std::string place() const;
};

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

AddressList look_up(const std::string& host, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(host.c_str(), nullptr, &hints, &list);
  if (error != 0) throw Error("the address " + host + " cannot be found: " + gai_strerror(error), {Error::machine});
  return {list, freeaddrinfo};
}

Address to_address(const std::string& numeric, int port) {
  const auto list = look_up(numeric, AI_NUMERICHOST);
  Address address;
  address.size = list->ai_addrlen;
  std::memcpy(&address.storage, list->ai_addr, list->ai_addrlen);
  const auto network_port = htons(static_cast<uint16_t>(port));
  if (list->ai_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(&address.storage)->sin6_port = network_port;
  } else {
    reinterpret_cast<sockaddr_in*>(&address.storage)->sin_port = network_port;
  }
  return address;
}

std::string to_text(const sockaddr* address, socklen_t size) {
  char text[NI_MAXHOST] = {};
  if (getnameinfo(address, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) return "";
  const std::string mapped = "::ffff:";  // begins an IPv4 address on sockets of both kinds
  return std::string(text).starts_with(mapped) ? text + mapped.size() : text;
}

std::string Address::place() const {
  return place_text(to_text(get(), size), port());
}

class Socket {
 public:
  Socket(int family, int type) : fd_(socket(family, type | SOCK_CLOEXEC, 0)) {
    if (fd_ < 0) throw Error("socket() failed: " + reason(errno), {Error::machine});
  }
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  Socket& operator=(Socket&&) = delete;

  int fd() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

// Gives this machine's address from which that one is reached. If there is no way, its size is 0, and errno says why.
Address local_address(const sockaddr* towards, socklen_t size) {
  const Socket socket(towards->sa_family, SOCK_DGRAM);  // connecting it sends nothing
  Address here;
  here.size = sizeof here.storage;
  if (connect(socket.fd(), towards, size) != 0 || getsockname(socket.fd(), here.get(), &here.size) != 0) here.size = 0;
  return here;
}

// If two sockets begin to listen at one port at the same moment, Linux may refuse both. So a process that is refused
// tries again, after a time that differs from the other's.
bool begins_to_listen(int fd) {
  for (int i = 0; i < 4; ++i) {
    if (i > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1 + getpid() % 16) * i);
    if (listen(fd, SOMAXCONN) == 0) return true;
    if (errno != EADDRINUSE) return false;
  }
  return false;
}

}  // namespace

// Addresses that this machine reaches come first, since a name may have addresses of a kind that it does not have.
std::string numeric_address(const std::string& host) {
  const auto list = look_up(host, 0);
  const auto is_reached = [](const addrinfo& entry) {
    try {
      return local_address(entry.ai_addr, entry.ai_addrlen).size > 0;
    } catch (const Error&) {  // the kernel has no sockets of this kind
      return false;
    }
  };
  const auto rank = [&](const addrinfo& entry) {
    return (is_reached(entry) ? 2 : 0) + (entry.ai_family == AF_INET ? 1 : 0);
  };
  const addrinfo* best = list.get();
  for (const addrinfo* entry = best->ai_next; entry != nullptr; entry = entry->ai_next) {
    if (rank(*entry) > rank(*best)) best = entry;
  }
  return to_text(best->ai_addr, best->ai_addrlen);
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1";
}

Listener listen_on(const std::string& address, int port, bool both_kinds) {
  Address where = to_address(address, port);
  Socket socket(where.storage.ss_family, SOCK_STREAM);
  const int yes = 1, no = 0;
  setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);  // allows a port whose last owner has just ended
  if (both_kinds) setsockopt(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
  if (bind(socket.fd(), where.get(), where.size) != 0 || !begins_to_listen(socket.fd())) {
    const int error = errno;
    throw Error("cannot listen at " + address + ", port " + std::to_string(port) + ": " + reason(error) +
                    (error == EADDRNOTAVAIL ? ". MASTER_ADDR must be an address of the machine on which rank 0 runs"
                                            : ". Another MASTER_PORT may be free"),
                {Error::machine});
  }
  getsockname(socket.fd(), where.get(), &where.size);
  return {socket.release(), where.port()};
}

Listener listen_everywhere(int port) {
  const int probe = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (probe < 0) return listen_on("0.0.0.0", port);  // the kernel has no IPv6
  close(probe);
  return listen_on("::", port, /*both_kinds=*/true);
}

int connect_to(const std::string& address, int port, std::chrono::steady_clock::time_point deadline) {
  const Address where = to_address(address, port);
  Socket socket(where.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK);
  if (connect(socket.fd(), where.get(), where.size) == 0) return socket.release();
  if (errno != EINPROGRESS) return -1;
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
  pollfd polled{socket.fd(), POLLOUT, 0};
  if (poll(&polled, 1, static_cast<int>(std::clamp<int64_t>(left.count(), 0, 3000))) != 1) return -1;
  int error = 0;
  socklen_t size = sizeof error;
  const bool connected = getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0;
  return connected ? socket.release() : -1;
}

void send_at_once(int fd) {
  const int yes = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
}

std::string own_address(int fd) {
  Address here;
  here.size = sizeof here.storage;
  return getsockname(fd, here.get(), &here.size) == 0 ? here.place() : "";
}

std::string peer_address(int fd) {
  Address peer;
  peer.size = sizeof peer.storage;
  return getpeername(fd, peer.get(), &peer.size) == 0 ? peer.place() : "an unknown address";
}

std::string place_text(const std::string& address, int port) {
  return (address.find(':') == std::string::npos ? address : "[" + address + "]") + ":" + std::to_string(port);
}

std::vector<Connection> connections_of_this_process() {
  std::vector<Connection> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const int fd = std::atoi(entry.path().filename().c_str());
    Address here, peer;
    here.size = peer.size = sizeof peer.storage;
    if (getpeername(fd, peer.get(), &peer.size) != 0) continue;  // this is no socket, or not connected
    if (peer.storage.ss_family != AF_INET && peer.storage.ss_family != AF_INET6) continue;
    if (getsockname(fd, here.get(), &here.size) == 0) found.push_back({fd, here.place(), peer.place()});
  }
  return found;
}

namespace {

std::vector<int> connections_to(const std::string& address, int port) {
  std::vector<int> found;
  for (const auto& connection : connections_of_this_process()) {
    if (connection.peer == place_text(address, port)) found.push_back(connection.fd);
  }
  return found;
}

}  // namespace

void limit_silence(const std::string& address, int port, std::chrono::seconds limit) {
  const timeval time{limit.count(), 0};
  for (const int fd : connections_to(address, port)) setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time);
}

void hang_up(const std::string& address, int port) {
  for (const int fd : connections_to(address, port)) shutdown(fd, SHUT_RDWR);
}

std::string host_name() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

std::string local_address_towards(const std::string& address, int port) {
  const Address where = to_address(address, port);
  const Address here = local_address(where.get(), where.size);
  if (here.size == 0) {
    throw Error("no network interface of this machine reaches " + address + ": " + reason(errno), {Error::machine});
  }
  return to_text(here.get(), here.size);
}

}  // namespace lockstep::comm
