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

// A container without a view of control groups is told a path of the host, but sees its own group at the top.
// /proc/vmstat counts all kills of the machine. This file serves where Linux has control groups of the first version.
MemoryKills::Files MemoryKills::files_of_kernel() {
  Files files;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (line.starts_with("0::")) files.push_back("/sys/fs/cgroup" + line.substr(3) + "/memory.events");
  }
  files.insert(files.end(), {"/sys/fs/cgroup/memory.events", "/proc/vmstat"});
  return files;
}

}  // namespace lockstep::cli
