// version: says which lockstep this is. `lockstep --version` prints the version, the CMake package has it, and
// CHANGELOG.md says what changed. Thread-safe, and costs nothing.
#pragma once

#include <string>

namespace lockstep {

// Gives the version by semantic versioning: "0.2.0". Before 1.0 a new middle number may change interfaces.
std::string version();

}  // namespace lockstep
