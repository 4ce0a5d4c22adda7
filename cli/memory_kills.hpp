// MemoryKills tells whether the kernel has killed a process for want of memory.
//
// Linux tells nobody why a process got SIGKILL. But the kernel counts its kills for want of memory, for each control
// group (a container, a job of SLURM, a login) and for the machine. A count that has grown makes such a kill probable,
// but not certain. Use it from one thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

namespace lockstep::cli {

class MemoryKills {
 public:
  using Files = std::vector<std::filesystem::path>;

  // Takes the first of `files` that has a count, in a line "oom_kill 3". Only later kills count.
  explicit MemoryKills(const Files& files = files_of_kernel());

  // Call this for each process that SIGKILL has ended. Tells whether there is one more kill than were taken before: two
  // processes that end at the same moment take one each.
  bool take();

 private:
  // Gives the files of this process's control group, and then the machine's.
  static Files files_of_kernel();

  std::filesystem::path file_;  // the file with the count; empty: nobody counts
  int64_t taken_ = 0;
};

}  // namespace lockstep::cli
