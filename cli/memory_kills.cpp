#include "memory_kills.hpp"

#include <fstream>
#include <optional>
#include <string>

namespace lockstep::cli {
namespace {

std::optional<int64_t> kills_in(const std::filesystem::path& file) {
  std::ifstream stream(file);
  std::string name;
  for (int64_t value = 0; stream >> name >> value;) {
    if (name == "oom_kill") return value;
  }
  return std::nullopt;
}

}  // namespace

MemoryKills::MemoryKills(const Files& files) {
  for (const auto& file : files) {
    const auto count = kills_in(file);
    if (!count) continue;
    file_ = file;
    taken_ = *count;
    return;
  }
}

bool MemoryKills::take() {
  if (kills_in(file_).value_or(0) <= taken_) return false;
  ++taken_;
  return true;
}

// A container without its own view of control groups is told a path of its host, but sees its own group at the top.
MemoryKills::Files MemoryKills::files_of_kernel() {
  Files files;
  std::ifstream groups("/proc/self/cgroup");  // "4:memory:/a/group", or "0::/a/group"
  for (std::string line; std::getline(groups, line);) {
    const size_t kind = line.find(':') + 1, path = line.find(':', kind) + 1;
    if (kind == 0 || path == 0) continue;
    const bool is_first_version = line.substr(kind, path - 1 - kind) == "memory";
    if (!is_first_version && path != kind + 1) continue;
    const std::string top = is_first_version ? "/sys/fs/cgroup/memory" : "/sys/fs/cgroup";
    const char* const file = is_first_version ? "/memory.oom_control" : "/memory.events";
    files.push_back(top + line.substr(path) + file);
    files.push_back(top + file);
  }
  files.emplace_back("/proc/vmstat");
  return files;
}

}  // namespace lockstep::cli
