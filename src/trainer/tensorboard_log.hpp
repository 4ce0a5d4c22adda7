// TensorBoardLog: a run's metrics as TensorBoard shows them, a point per epoch.
//
//   loss/train  loss/test  accuracy/train  accuracy/test  learning_rate
//   NAME/test             a metric of a Task
//   images_per_second     of the training, all ranks together
//   wait_for_data/rank_0  seconds of the epoch in which the rank had no minibatch yet; so for every rank
#pragma once

#include <lockstep/trainer/metrics.hpp>

#include <cstdint>
#include <filesystem>
#include <optional>

#include "io/tfevents.hpp"

namespace lockstep {

class TensorBoardLog {
 public:
  // Begins the file with the first epoch.
  explicit TensorBoardLog(std::filesystem::path folder);

  // `images` counts those of an epoch. Throws Error if the file cannot be written.
  void write(const EpochMetrics& metrics, double lr, int64_t images);

 private:
  std::filesystem::path folder_;
  std::optional<io::TfEvents> events_;
};

}  // namespace lockstep
