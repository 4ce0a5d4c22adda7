// build_id: names the build of this program, so that processes can compare. The linker computes the name from the
// linked files. The same compiler, options and sources give the same name in the same folder. With -ffile-prefix-map
// they do so in any folder, since texts then hold no paths.
//
// Where an interpreter loads lockstep, the program is the interpreter.
#pragma once

#include <cstddef>
#include <string>

namespace lockstep {

// Gives the first 16 hexadecimal digits of what the linker wrote into the program (--build-id). If lockstep is in a
// shared library, "+" and that library's digits follow. It gives "" if the linker wrote nothing. Costs some 10 us.
std::string build_id();

// Gives the ID in a segment of ELF notes, or "" if there is none. `alignment` is the segment's, 4 or 8.
std::string build_id_in_notes(const char* note, const char* end, size_t alignment);

}  // namespace lockstep
