// Doors: the listening sockets of Gloo, which itself lets everybody in for as long as a group lives. A door that is
// shut makes the system drop whoever knocks, without an answer. Connections that are there are left alone. For sockets
// that nobody closes meanwhile.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::comm {

// This process's listening sockets whose address, as the system writes it, stands somewhere in these bytes. What Gloo
// tells its peers has it.
std::vector<int> doors_told_in(const std::vector<uint8_t>& bytes);

// Gives why a door stays open; "": none does.
[[nodiscard]] std::string shut_doors(const std::vector<int>& doors);

// Lets everybody connect. What they then say is dropped, until the connection itself is opened like a door. Gives why a
// door is not hushed; "": all are.
[[nodiscard]] std::string hush_doors(const std::vector<int>& doors);

// One that is not shut, or that its owner has closed meanwhile, is left as it is.
void open_doors(const std::vector<int>& doors);

}  // namespace lockstep::comm
