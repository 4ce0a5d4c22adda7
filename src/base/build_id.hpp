// build_id: which build this program is, so that processes can compare. It is of what was linked. The same compiler,
// options and sources give the same one in the same folder, or with -ffile-prefix-map: texts may hold paths.
//
// Where an interpreter loads lockstep, the program is the interpreter.
#pragma once

#include <cstddef>
#include <string>

namespace lockstep {

// The first 16 hexadecimal digits of what the linker wrote into the program (--build-id), and if lockstep is in a
// shared library, "+" and that one's. Empty: the linker wrote nothing. Costs some 10 us.
std::string build_id();

// The ID in a segment of ELF notes; "": there is none. `alignment` is the segment's, 4 or 8.
std::string build_id_in_notes(const char* note, const char* end, size_t alignment);

}  // namespace lockstep
