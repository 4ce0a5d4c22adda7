#include "door.hpp"

#include <linux/filter.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "io/reason.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <system_error>

namespace lockstep::comm {
namespace {

bool listens(int fd) {
  int answer = 0;
  socklen_t size = sizeof answer;
  return getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &answer, &size) == 0 && answer != 0;
}

// Gives the bytes of a socket's kind of address, port and address. The bytes after them may be anything.
std::vector<uint8_t> address_bytes(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return {};
  const auto* const begin = reinterpret_cast<const uint8_t*>(&address);
  if (address.ss_family == AF_INET) return {begin, begin + offsetof(sockaddr_in, sin_zero)};
  if (address.ss_family == AF_INET6) return {begin, begin + offsetof(sockaddr_in6, sin6_scope_id)};
  return {};
}

template <size_t count>
std::string attach_filter(const std::vector<int>& sockets, sock_filter (&instructions)[count]) {
  const sock_fprog program{count, instructions};
  std::string why;
  for (const int fd : sockets) {
    if (setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program) != 0) why = io::reason(errno);
  }
  return why;
}

}  // namespace

std::vector<int> doors_told_in(const std::vector<uint8_t>& bytes) {
  std::vector<int> doors;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const int fd = std::atoi(entry.path().filename().c_str());
    if (!listens(fd)) continue;
    const auto address = address_bytes(fd);
    const bool told = std::search(bytes.begin(), bytes.end(), address.begin(), address.end()) != bytes.end();
    if (told && !address.empty()) doors.push_back(fd);
  }
  return doors;
}

std::string shut_doors(const std::vector<int>& doors) {
  sock_filter drop_all[] = {BPF_STMT(BPF_RET | BPF_K, 0)};
  return attach_filter(doors, drop_all);
}

// A filter sees a segment from its header on; the upper half of byte 12 has the header's length in words. Connections
// inherit their door's filter.
std::string hush_doors(const std::vector<int>& doors) {
  sock_filter drop_content[] = {BPF_STMT(BPF_LD | BPF_B | BPF_ABS, 12), BPF_STMT(BPF_ALU | BPF_RSH | BPF_K, 4),
                                BPF_STMT(BPF_ALU | BPF_LSH | BPF_K, 2), BPF_STMT(BPF_MISC | BPF_TAX, 0),
                                BPF_STMT(BPF_LD | BPF_W | BPF_LEN, 0),  BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_X, 0, 0, 1),
                                BPF_STMT(BPF_RET | BPF_K, ~0U),         BPF_STMT(BPF_RET | BPF_K, 0)};
  return attach_filter(doors, drop_content);
}

void open_doors(const std::vector<int>& doors) {
  const int ignored = 0;
  for (const int door : doors) setsockopt(door, SOL_SOCKET, SO_DETACH_FILTER, &ignored, sizeof ignored);
}

}  // namespace lockstep::comm
