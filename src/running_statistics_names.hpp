// Which of a module's buffers are BatchNorm's running statistics, which follow a rank's own samples.
#pragma once

#include <string>

namespace lockstep {

inline std::string last_word(const std::string& path) {
  return path.substr(path.rfind('.') + 1);
}

inline bool is_running_statistic(const std::string& path) {
  const std::string name = last_word(path);
  return name == "running_mean" || name == "running_var" || name == "num_batches_tracked";
}

}  // namespace lockstep
