#include "kept_run.hpp"

#include "batch_settings.hpp"
#include "resume.hpp"
#include "take_over.hpp"
#include "train_options.hpp"

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
  if (settings_.keep.tensorboard && !settings_.keep.run_dir.empty()) board_.emplace(settings_.keep.run_dir);
}

void KeptRun::epoch(const std::vector<EpochMetrics>& history, const torch::nn::Module& net) {
  folder_->write(history, net);
  if (board_) board_->write(history.back(), history.back().lr, samples_);
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
