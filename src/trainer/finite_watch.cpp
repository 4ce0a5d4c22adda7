#include "finite_watch.hpp"

#include <ATen/ops/zeros.h>

#include "flat_options.hpp"
#include "optim/finite_sum.hpp"
#include "ranks/gather.hpp"
#include "ranks/rank_wait.hpp"

#include <cmath>
#include <utility>

namespace lockstep {

FiniteWatch::FiniteWatch(const TrainOptions& options, const Rank& rank, const Update& update, bool ranks_differ)
    : on_nan_(options.on_nan),
      round_(flat(options).local.sync_every),
      rank_(rank),
      update_(update),
      ranks_differ_(ranks_differ),
      loss_(at::zeros({}, at::TensorOptions(rank.device()).dtype(at::kDouble))) {}

void FiniteWatch::watch() {
  if (on_nan_ == OnNan::go_on) return;
  if (round_ > 0) {
    Step step = take_step();
    if (open_) {
      step.sum += open_->sum;
      step.loss += open_->loss;
    }
    open_ = std::move(step);
    if (number_ % round_ == 0) settle();
  } else if (rank_.device().is_cpu()) {
    complaint_ = judge();
  } else {
    Step step = take_step();
    ask(step);
    settle();
    open_ = std::move(step);
  }
}

void FiniteWatch::settle() {
  if (!open_) return;
  complaint_ = what_is_not_finite(*open_);
  open_.reset();
}

std::string FiniteWatch::judge() {
  Step step = take_step();
  return what_is_not_finite(step);
}

FiniteWatch::Step FiniteWatch::take_step() {
  Step step{.number = number_, .sum = finite_sum(update_.gradients(), rank_.device()), .loss = loss_.clone()};
  loss_.zero_();
  return step;
}

void FiniteWatch::ask(Step& step) {
  if (ranks_differ_) rank_.allreduce(step.sum);
  step.answer.emplace(step.sum);
}

std::string FiniteWatch::what_is_not_finite(Step& step) {
  if (!step.answer) ask(step);
  if (const c10::Event* const arrival = step.answer->arrival()) wait_for(rank_, *arrival);
  if (std::isfinite(step.answer->values().item<double>())) return "";
  const at::Tensor finite = of_all_ranks(rank_, {std::isfinite(step.loss.item<double>()) ? 1 : 0});
  std::string ranks;
  for (int64_t rank = 0; rank < finite.size(0); ++rank) {
    if (finite[rank][0].item<int64_t>() == 0) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  }
  return "epoch " + std::to_string(epoch_) + ", step " + std::to_string(step.number) + ": " +
         (ranks.empty() ? "the gradients are not finite, though the loss is, on every rank"
                        : "the loss of rank " + ranks + " is not finite");
}

}  // namespace lockstep
