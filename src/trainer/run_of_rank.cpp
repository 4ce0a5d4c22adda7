#include "run_of_rank.hpp"

#include <lockstep/nn/tensor_files.hpp>

#include "common_settings.hpp"
#include "devices/cuda_graph.hpp"
#include "ranks/rank_wait.hpp"

#include <algorithm>
#include <utility>

namespace lockstep {
namespace {

std::optional<RunState> begin_of(SharedRun& run, Rank& rank) {
  std::optional<RunState> begin = run.elastic ? run.elastic->begin(rank) : run.resumed;  // the copy shares the tensors
  if (rank.index_in_process() != 0) return begin;
  run.result.history = begin ? begin->history : std::vector<EpochMetrics>();
  run.not_finite.clear();
  return begin;
}

}  // namespace

RunOfRank::RunOfRank(SharedRun& run, Rank& rank)
    : run_(run),
      settings_(run.settings),
      task_(run.workload.task),
      rank_(rank),
      is_first_here_(rank.index_in_process() == 0),
      may_mend_(run.elastic && run.elastic->may_mend()),
      judge_(judge_of(task_)),
      begin_(begin_of(run, rank)),
      history_(begin_ ? begin_->history : std::vector<EpochMetrics>()),
      trainer_(settings_, run.callbacks, task_, rank, run.trace, settings_.cuda_graph ? make_cuda_graph() : nullptr,
               begin_ ? &*begin_ : nullptr),
      keep_(keeps_checkpoints(settings_) ? [this] { keep_state(); } : RankTrainer::Keep()) {
  if (run.elastic) trainer_.be_elastic(run.elastic->newer());
}

void RunOfRank::train() {
  const RankLayout layout = trainer_.layout();
  if (rank_.index() == 0) run_.kept.notes().set(layout);
  try {
    keep_what_is_owed();
    train_epochs();
  } catch (const ReplicasDiffer& difference) {
    if (!may_mend_ || difference.ranks().empty()) throw;
    return mend(difference);
  } catch (...) {
    leave_state();
    throw;
  }
  leave_state();
  if (run_.trace) run_.trace->end(rank_);
}

// The process that writes an elastic job's files may be gone between an epoch's evaluation and its files.
void RunOfRank::keep_what_is_owed() {
  const bool between_epochs = begin_ && begin_->steps == 0 && !begin_->history.empty();
  if (!run_.elastic || !run_.elastic->is_successor() || !between_epochs) return;  // all ranks return here together
  if (!rank_.any(rank_.index() == 0 && !run_.kept.has_kept(begin_->epochs))) return;
  trainer_.show();
  keep_epoch(begin_->history.back(), *trainer_.whole());
}

void RunOfRank::train_epochs() {
  for (int number = begin_ ? begin_->epochs + 1 : 1; number <= settings_.epochs; ++number) {
    if (is_enough(history_, judge_, task_.patience)) break;
    EpochMetrics metrics = trainer_.epoch(number, keep_);
    if (trainer_.regroups()) return;
    synchronize_users(rank_);  // other ranks may have written the values read below
    if (!trainer_.not_finite().empty()) {
      if (is_first_here_) run_.not_finite = trainer_.not_finite();
      break;
    }
    end_epoch(std::move(metrics));
  }
  if (!is_first_here_) return;
  run_.result.straggler = trainer_.straggler();
  if (run_.elastic) run_.elastic->end();
}

void RunOfRank::end_epoch(EpochMetrics metrics) {
  const auto net = trainer_.whole();
  if (is_first_here_) {
    metrics.weights = weights_hash(*net);
    run_.result.history.push_back(metrics);
  }
  history_.push_back(metrics);
  const std::string remark = task_.test.size() > 0 ? remark_on_no_value(history_, judge_, task_.patience) : "";
  if (rank_.index() == 0 && !remark.empty()) run_.callbacks.on_warning(remark);
  keep_epoch(metrics, *net);
}

void RunOfRank::keep_epoch(const EpochMetrics& metrics, const torch::nn::Module& net) {
  if (rank_.index() == 0) run_.kept.epoch(run_.result.history, net);
  if (keep_) keep_();
  if (rank_.index() == 0) run_.kept.tell(metrics);
}

void RunOfRank::keep_state() {
  RunState state = trainer_.state();
  if (rank_.index() == 0) run_.kept.checkpoint(complete(std::move(state)));
}

void RunOfRank::leave_state() {
  if (run_.elastic && is_first_here_) run_.elastic->leave_behind(complete(trainer_.whole_steps()));
}

// All ranks throw `difference` in the same call.
void RunOfRank::mend(const ReplicasDiffer& difference) {
  if (rank_.index() == 0)
    run_.callbacks.on_warning(std::string(difference.what()) + ". The others go on, and give it their state");
  if (!is_first_here_) return;
  run_.elastic->mend();
  const auto& wrong = difference.ranks();
  const bool is_wrong = std::find(wrong.begin(), wrong.end(), rank_.index()) != wrong.end();
  is_wrong ? run_.elastic->drop() : leave_state();
}

RunState RunOfRank::complete(RunState state) const {
  state.epochs = static_cast<int>(run_.result.history.size());
  state.history = run_.result.history;
  state.config = to_json(settings_);
  state.data = run_.workload.digests;
  state.processor = run_.processor;
  return state;
}

}  // namespace lockstep
