// Doors are Gloo's listening sockets. Gloo itself lets everybody in for as long as a group lives. When a door is shut,
// the system drops whoever knocks, without an answer; connections that are there stay. Keep the sockets open meanwhile.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::comm {

// Gives this process's listening sockets whose address, as the system writes addresses, stands somewhere in these
// bytes. The bytes that Gloo tells its peers have that address.
std::vector<int> doors_told_in(const std::vector<uint8_t>& bytes);

// Says why a door stays open, or "" if none does.
[[nodiscard]] std::string shut_doors(const std::vector<int>& doors);

// Lets everybody connect, but drops what comes over a connection until the connection itself is opened like a door.
// Says why a door is not hushed, or "" if all are.
[[nodiscard]] std::string hush_doors(const std::vector<int>& doors);

// Opens doors again. A door that is open, or that its owner has closed meanwhile, stays so.
void open_doors(const std::vector<int>& doors);

}  // namespace lockstep::comm
