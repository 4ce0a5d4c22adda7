// Reads what Linux says about a process, or a thread, in the file "stat" of its folder under /proc.
#pragma once

#include <filesystem>
#include <fstream>
#include <string>

namespace lockstep::io {

// Gives the rest after the name, as "S 4711 4712 ...": the state, the parent, the process group, and more. (The name
// may hold anything.) It gives "" if the process is gone.
inline std::string stat_after_name(const std::filesystem::path& folder) {
  std::ifstream file(folder / "stat");
  std::string line;
  std::getline(file, line);  // "123 (a name) S ..."
  const size_t name_end = line.rfind(") ");
  return name_end == std::string::npos ? "" : line.substr(name_end + 2);
}

}  // namespace lockstep::io
