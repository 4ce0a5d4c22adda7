// build_id: which build this program is, so that processes can compare. Sources are not seen: two builds of the same
// sources by the same compiler and linker are equal.
#pragma once

#include <string>

namespace lockstep {

// The first 16 hexadecimal digits of what the linker wrote into the program (--build-id), and if lockstep is in a
// shared library, "+" and that one's. Empty: the linker wrote nothing. Costs some 10 us.
std::string build_id();

}  // namespace lockstep
