#include "elastic_run.hpp"

#include "elastic.hpp"
#include "train_options.hpp"

#include <filesystem>
#include <string>

namespace lockstep {
namespace {

std::string checkpoints_of(const std::filesystem::path& run) {
  return run.empty() ? "" : (std::filesystem::absolute(run) / kCheckpointFolder).string();
}

}  // namespace

std::shared_ptr<ElasticRun> ElasticRun::of(const TrainOptions& settings, const TrainCallbacks& callbacks,
                                           KeptRun& kept) {
  if (!ElasticJob::is_asked_for()) return nullptr;
  check_elastic(settings);
  return std::make_shared<ElasticRun>(settings, callbacks, kept);
}

ElasticRun::ElasticRun(const TrainOptions& settings, const TrainCallbacks& callbacks, KeptRun& kept)
    : job_(callbacks.stop, settings.silence, checkpoints_of(settings.keep.run_dir)), kept_(kept) {}

bool ElasticRun::enter() {
  is_done_ = differs_ = false;
  if (left_) state_ = std::exchange(left_, std::nullopt);
  if (!job_.enter()) return false;
  if (this_process().index == 0) kept_.take_over(met_);
  return true;
}

bool ElasticRun::goes_on() {
  if (differs_) job_.leave();
  return !is_done_;
}

std::optional<RunState> ElasticRun::begin(Rank& rank) {
  if (rank.index_in_process() == 0) met_ = true;
  std::optional<RunState> state = state_;  // the copy shares the tensors
  hand_over(state, rank);
  if (rank.index() == 0) job_.note_beginning();
  return state;
}

}  // namespace lockstep
