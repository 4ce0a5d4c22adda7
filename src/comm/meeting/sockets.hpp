// These are the few calls of the system's sockets that LibTorch does not offer. Addresses are numeric texts:
// "127.0.0.1", "::1".
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace lockstep::comm {

// Gives the numeric address of a host. If a host has several, the address is one that this machine reaches, preferably
// of IPv4. Throws Error that names the host.
std::string numeric_address(const std::string& host);

bool is_loopback(const std::string& address);

struct Listener {
  int fd;
  int port;
};

// Makes a socket that listens at this address alone; port 0 takes a free one. With `both_kinds`, "::" takes
// connections over IPv4 too. Throws Error that names address and port.
Listener listen_on(const std::string& address, int port, bool both_kinds = false);

// Makes one that listens at every address of this machine, IPv4 and IPv6.
Listener listen_everywhere(int port);

// Makes a connection, which does not block, to what listens there. Gives -1 if nothing accepts it by the deadline, or
// within 3 s.
int connect_to(const std::string& address, int port, std::chrono::steady_clock::time_point deadline);

void send_at_once(int fd);         // sends small messages without waiting for more
std::string own_address(int fd);   // gives a socket's address, as place_text does, or ""
std::string peer_address(int fd);  // gives the address of a connection's other end

// Gives "127.0.0.1:80" or "[::1]:80".
std::string place_text(const std::string& address, int port);

// A Connection is one of this process's over TCP, with both ends as place_text gives them.
struct Connection {
  int fd;
  std::string here, peer;
};
std::vector<Connection> connections_of_this_process();

// Makes this process's reads from its connections to that address fail if nothing comes for so long.
void limit_silence(const std::string& address, int port, std::chrono::seconds limit);

// Ends every connection of this process to that address, so that waits for an answer fail.
void hang_up(const std::string& address, int port);

// Gives this machine's address from which `address` is reached. Throws Error if there is no way to it.
std::string local_address_towards(const std::string& address, int port);

std::string host_name();  // gives the name of this machine

}  // namespace lockstep::comm
