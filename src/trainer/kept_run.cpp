#include "kept_run.hpp"

#include "batch_settings.hpp"
#include "resume.hpp"
#include "take_over.hpp"
#include "train_options.hpp"

#include <chrono>
#include <cmath>
#include <filesystem>
#include <lockstep/base/version.hpp>
#include <lockstep/devices/device_info.hpp>
#include <string>
#include <system_error>
#include <utility>

namespace lockstep {
namespace {

namespace fs = std::filesystem;

bool goes_on_in_its_folder(const TrainOptions& options) {
  if (options.keep.resume.empty() || options.keep.run_dir.empty()) return false;
  std::error_code different;
  return fs::equivalent(run_to_go_on(options.keep.resume), options.keep.run_dir, different);
}

// TensorBoard reads a folder's files in the order of their names, and takes the number for a time. If a run goes on
// within the same second, it needs another number.
fs::path new_events_in(const fs::path& folder, double now) {
  for (auto second = static_cast<int64_t>(now);; ++second) {
    auto file = folder / ("events.out.tfevents." + std::to_string(second) + ".lockstep");
    std::error_code unreadable;
    if (!fs::exists(file, unreadable)) return file;
  }
}

}  // namespace

KeptRun::KeptRun(const TrainOptions& settings, const TrainCallbacks& callbacks, RunNotes& notes)
    : settings_(settings), callbacks_(callbacks), notes_(notes), is_keeper_(this_process().index == 0) {
  folder_.emplace(is_keeper_ ? settings.keep.run_dir : "", goes_on_in_its_folder(settings));
  folder_->take(notes);
}

void KeptRun::create(const Workload& workload) {
  judge_ = judge_of(workload.task);
  notes_.set("title", workload.title + ", " + to_string(settings_.devices) + ", batch size " +
                          std::to_string(settings_.batch.global()));
  notes_.set("lockstep", version());
  notes_.set("end", "");
  notes_.set("best", {{"by", judge_.measure}, {"more_is_better", judge_.more_is_better}});
  samples_ = samples_of_epoch(settings_.batch, workload.task.train.size());
  folder_->create(settings_, judge_, callbacks_.on_warning);
}

void KeptRun::epoch(const std::vector<EpochMetrics>& history, const torch::nn::Module& net) {
  folder_->write(history, net);
  if (settings_.keep.tensorboard && !settings_.keep.run_dir.empty()) write_events(history.back());
}

// Writes the metrics as TensorBoard shows them, a point per epoch. Throws Error if the file cannot be written.
//
//   loss/train  loss/test  accuracy/train  accuracy/test  learning_rate
//   NAME/test             a metric of a Task
//   images_per_second     of the training, all ranks together
//   wait_for_data/rank_0  seconds of the epoch in which the rank had no minibatch yet; so for every rank
void KeptRun::write_events(const EpochMetrics& metrics) {
  const double now = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  if (!events_) events_.emplace(new_events_in(settings_.keep.run_dir, now), now, metrics.epoch);
  io::Scalars scalars = {{"loss/train", metrics.train_loss},
                         {"learning_rate", metrics.lr},
                         {"images_per_second", static_cast<double>(samples_) / metrics.seconds}};
  if (!std::isnan(metrics.train_accuracy)) scalars.emplace_back("accuracy/train", metrics.train_accuracy);
  if (!std::isnan(metrics.test_accuracy)) scalars.emplace_back("accuracy/test", metrics.test_accuracy);
  for (const auto& [name, value] : metrics.test) scalars.emplace_back(name + "/test", value);
  for (size_t rank = 0; rank < metrics.ranks.size(); ++rank) {
    scalars.emplace_back("wait_for_data/rank_" + std::to_string(rank), metrics.ranks[rank].data_wait);
  }
  events_->add(now, metrics.epoch, scalars);
}

void KeptRun::tell(const EpochMetrics& metrics) {
  kept_epochs_ = metrics.epoch;
  if (std::exchange(told_epochs_, metrics.epoch) < metrics.epoch && callbacks_.on_epoch) callbacks_.on_epoch(metrics);
}

void KeptRun::take_over(bool met) {
  if (std::exchange(is_keeper_, true)) return;
  const fs::path metrics = settings_.keep.run_dir / kMetricsFile;
  const bool is_there =
      lockstep::take_over(folder_, settings_, judge_,
                          {.met = met, .goes_on = goes_on_in_its_folder(settings_), .warn = callbacks_.on_warning});
  folder_->take(notes_);
  if (is_there && fs::exists(metrics)) told_epochs_ = static_cast<int>(read_metrics(metrics).size());
}

}  // namespace lockstep
