// By these keys each member of a group tells the others through the store how far it is.
#pragma once

#include "comm/group_member.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::comm {

inline std::string key_of_member(const std::string& what, int rank) {
  return what + "/" + std::to_string(rank);
}

inline std::vector<std::string> keys_of_members(const std::string& what, int size) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < size; ++rank) keys.push_back(key_of_member(what, rank));
  return keys;
}

// Says that this member has come to `what`, and waits until all members have.
inline void wait_for_members(const GroupPlace& place, const std::string& what, std::chrono::milliseconds timeout) {
  place.store->set(key_of_member(what, place.rank), std::vector<uint8_t>{1});
  place.store->wait(keys_of_members(what, place.size), timeout);
}

}  // namespace lockstep::comm
