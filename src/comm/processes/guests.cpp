#include "guests.hpp"

#include <sys/socket.h>

#include "base/classic.hpp"
#include "comm/meeting/sockets.hpp"
#include "door.hpp"
#include "keys_of_members.hpp"

#include <cstdint>
#include <utility>

namespace lockstep::comm {
namespace {

void append_line(c10d::Store& store, const std::string& key, const std::string& line) {
  const std::string text = line + "\n";
  store.append(key, std::vector<uint8_t>(text.begin(), text.end()));
}

}  // namespace

Guests::Guests(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
    : store_(std::move(store)), rank_(rank), size_(size), doors_(size) {}

void Guests::tell_of_doors(c10d::Store& store, int rank, const std::vector<int>& doors) {
  for (const int door : doors) append_line(store, key_of_member("doors", rank), own_address(door));
}

void Guests::look() {
  for (int member = 0; member < size_; ++member) {
    if (doors_[member].empty()) doors_[member] = lines_of("doors", member);
  }
  const auto guests = lines_of("guests", rank_);
  for (const auto& connection : connections_of_this_process()) {
    if (doors_[rank_].contains(connection.here)) {
      if (guests.contains(connection.peer) && let_in_.insert(connection.fd).second) open_doors({connection.fd});
      continue;
    }
    for (int member = 0; member < size_; ++member) {
      const bool is_new = doors_[member].contains(connection.peer) && told_.insert(connection.here).second;
      if (is_new) append_line(*store_, key_of_member("guests", member), connection.here);
    }
  }
}

std::vector<std::string> Guests::turn_strangers_away() {
  std::vector<std::string> strangers;
  for (const auto& connection : connections_of_this_process()) {
    if (!doors_[rank_].contains(connection.here) || let_in_.contains(connection.fd)) continue;
    shutdown(connection.fd, SHUT_RDWR);  // then Gloo lets go of the connection
    strangers.push_back(connection.peer);
  }
  return strangers;
}

std::set<std::string> Guests::lines_of(const std::string& what, int member) {
  const std::string key = key_of_member(what, member);
  std::set<std::string> lines;
  if (!store_->check({key})) return lines;
  Classic<std::istringstream> text(store_->get_to_str(key));
  for (std::string line; std::getline(text, line);) lines.insert(line);
  return lines;
}

}  // namespace lockstep::comm
