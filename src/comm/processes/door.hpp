// Doors: the listening sockets of Gloo, which itself lets everybody in for as long as a group lives. A door that is
// shut makes the system drop whoever knocks, without an answer. Connections that are there are left alone. Where the
// system does not offer that, a door stays open. For sockets that nobody closes meanwhile.
#pragma once

#include <cstdint>
#include <vector>

namespace lockstep::comm {

// This process's listening sockets whose address, as the system writes it, stands somewhere in these bytes. What Gloo
// tells its peers has it.
std::vector<int> doors_told_in(const std::vector<uint8_t>& bytes);

void shut_doors(const std::vector<int>& doors);
void open_doors(const std::vector<int>& doors);

// Lets everybody connect. What they then say is dropped, until the connection itself is opened like a door.
void hush_doors(const std::vector<int>& doors);

}  // namespace lockstep::comm
