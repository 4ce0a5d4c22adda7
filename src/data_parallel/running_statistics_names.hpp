// Tells which of a module's buffers are running statistics, which follow a rank's own samples: those with the names of
// LibTorch's BatchNorm, in any layer. By grains GrainStatistics must know each layer that has one of them.
#pragma once

#include <string>

namespace lockstep {

// Gives "running_mean" for "bn1.running_mean".
inline std::string name_of_buffer(const std::string& path) {
  return path.substr(path.rfind('.') + 1);
}

inline bool is_running_statistic(const std::string& path) {
  const std::string name = name_of_buffer(path);
  return name == "running_mean" || name == "running_var" || name == "num_batches_tracked";
}

}  // namespace lockstep
