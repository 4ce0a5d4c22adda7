#include "tensorboard_log.hpp"

#include <chrono>
#include <cmath>
#include <string>
#include <utility>

namespace lockstep {
namespace {

// TensorBoard reads a folder's files in the order of their names, and takes the number for a time. If a run goes on
// within the same second, it needs another number.
std::filesystem::path new_file_in(const std::filesystem::path& folder, double now) {
  for (auto second = static_cast<int64_t>(now);; ++second) {
    auto file = folder / ("events.out.tfevents." + std::to_string(second) + ".lockstep");
    std::error_code unreadable;
    if (!std::filesystem::exists(file, unreadable)) return file;
  }
}

}  // namespace

TensorBoardLog::TensorBoardLog(std::filesystem::path folder) : folder_(std::move(folder)) {}

void TensorBoardLog::write(const EpochMetrics& metrics, double lr, int64_t images) {
  const double now = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  if (!events_) events_.emplace(new_file_in(folder_, now), now, metrics.epoch);
  io::Scalars scalars = {{"loss/train", metrics.train_loss},
                         {"learning_rate", lr},
                         {"images_per_second", static_cast<double>(images) / metrics.seconds}};
  if (!std::isnan(metrics.train_accuracy)) scalars.emplace_back("accuracy/train", metrics.train_accuracy);
  if (!std::isnan(metrics.test_accuracy)) scalars.emplace_back("accuracy/test", metrics.test_accuracy);
  for (const auto& [name, value] : metrics.test) scalars.emplace_back(name + "/test", value);
  for (size_t rank = 0; rank < metrics.ranks.size(); ++rank) {
    scalars.emplace_back("wait_for_data/rank_" + std::to_string(rank), metrics.ranks[rank].data_wait);
  }
  events_->add(now, metrics.epoch, scalars);
}

}  // namespace lockstep
