// MemoryGroup: a control group with a memory limit, as a container has one, for a job of a test.
//
// The group lies below the test's own, so it lifts no limit. Most systems let only root make one.
#pragma once

#include <signal.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <thread>

#include "job.hpp"

namespace lockstep {

class MemoryGroup {
 public:
  explicit MemoryGroup(int64_t bytes) {
    std::ifstream groups("/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {
      const size_t path = line.find(":memory:/"), second_version = line.find("0::/");
      if (path != line.npos) make("/sys/fs/cgroup/memory" + line.substr(path + 8), "memory.limit_in_bytes", bytes);
      if (second_version == 0) make("/sys/fs/cgroup" + line.substr(3), "memory.max", bytes);
    }
  }
  ~MemoryGroup() {
    std::error_code busy;
    for (int i = 0; i < 100 && !folder_.empty() && !std::filesystem::remove(folder_, busy); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(20));  // its last process has just ended
  }
  MemoryGroup(const MemoryGroup&) = delete;
  MemoryGroup& operator=(const MemoryGroup&) = delete;

  bool is_there() const { return !folder_.empty(); }

  // lockstep with these arguments, in the group.
  Surroundings with(Surroundings surroundings) const {
    surroundings.program = "/bin/sh";
    return surroundings;
  }
  Words lockstep(const Words& arguments) const {
    return Words{"-c", "echo $$ >\"$0\" && exec \"$@\"", (folder_ / "cgroup.procs").string(),
                 from_environment("LOCKSTEP_PROGRAM")} +
           arguments;
  }

 private:
  void make(const std::filesystem::path& above, const std::string& limit, int64_t bytes) {
    std::error_code error;
    const auto folder = above / ("lockstep-test-" + std::to_string(getpid()));
    if (!folder_.empty() || !std::filesystem::create_directory(folder, error)) return;
    std::ofstream file(folder / limit);
    if (file << bytes && file.flush()) {
      folder_ = folder;
    } else {
      std::filesystem::remove(folder, error);
    }
  }

  std::filesystem::path folder_;  // empty: the system allows none
};

}  // namespace lockstep
