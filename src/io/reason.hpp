// Gives the system's words for an error number: "No such file or directory".
#pragma once

#include <string>
#include <system_error>

namespace lockstep::io {

inline std::string reason(int error) {
  return std::generic_category().message(error);
}

}  // namespace lockstep::io
