#include "finite_watch.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>

#include "devices/device_streams.hpp"
#include "flat_options.hpp"
#include "optim/finite_sum.hpp"
#include "ranks/gather.hpp"
#include "ranks/rank_wait.hpp"

#include <cmath>

namespace lockstep {

HostCopy::HostCopy(const at::Tensor& tensor) : values_(tensor.detach()) {
  const c10::Device device = tensor.device();
  if (device.is_cpu()) return;
  // The memory is pinned, since the host would wait for a copy to other memory.
  values_ = at::empty(tensor.sizes(), at::TensorOptions(tensor.scalar_type()).pinned_memory(true));
  values_.copy_(tensor.detach(), /*non_blocking=*/true);
  arrived_.emplace(device.type());
  arrived_->record(current_stream(device));
}

FiniteWatch::FiniteWatch(const TrainOptions& options, const Rank& rank, const Update& update, at::Tensor loss,
                         bool ranks_differ)
    : on_nan_(options.on_nan),
      round_(flat(options).local.sync_every),
      rank_(rank),
      update_(update),
      ranks_differ_(ranks_differ),
      loss_(std::move(loss)),
      mark_(at::zeros({1}, at::TensorOptions(rank.device()).dtype(on_gpu() ? at::kFloat : at::kDouble))),
      one_(at::ones_like(mark_)) {}

at::Tensor FiniteWatch::found() const {
  return on_gpu() && on_nan_ != OnNan::go_on && round_ == 0 ? mark_ : at::Tensor();
}

void FiniteWatch::add_loss(const at::Tensor& mean) {
  if (judges_losses()) losses_.push_back(mean.detach());
}

void FiniteWatch::mark() {
  std::vector<at::Tensor> judged = std::exchange(losses_, {});
  if (on_nan_ == OnNan::go_on) return;
  const std::vector<at::Tensor> gradients = update_.gradients();
  judged.insert(judged.end(), gradients.begin(), gradients.end());
  on_gpu() ? find_not_finite(judged, mark_, one_) : void(mark_.add_(finite_sum(judged, rank_.device())));
  if (ranks_differ_ && round_ == 0) add_up();
}

// LibTorch's kernels skip where a GPU's mark is 1, and go on where it is 2.
void FiniteWatch::add_up() {
  rank_.allreduce(mark_, on_gpu() ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM);
}

void FiniteWatch::look() {
  if (on_nan_ == OnNan::go_on) return;
  Step step{.number = number_};
  if (skipped_) {
    step.loss.emplace(bad_loss_);
  } else if (on_gpu() && !update_.can_skip()) {  // weights that are not finite would spoil the next step's loss
    step.loss.emplace(loss_);
  }
  if (round_ > 0) {
    open_ = std::move(step);
    if (number_ % round_ == 0) settle();
  } else if (on_gpu()) {
    ask(step);
    settle();
    open_ = std::move(step);
  } else {
    complaint_ = what_is_not_finite(step);
  }
}

void FiniteWatch::settle() {
  if (!open_) return;
  const std::string wrong = what_is_not_finite(*open_);
  open_.reset();
  if (!skipped_) {
    complaint_ = wrong;
  } else if (!wrong.empty()) {
    skipped_(wrong);
  }
}

std::string FiniteWatch::judge() {
  settle();
  mark_.zero_();
  mark();
  Step step{.number = number_};
  return what_is_not_finite(step);
}

void FiniteWatch::ask(Step& step) {
  if (ranks_differ_ && round_ > 0) add_up();
  step.answer.emplace(mark_);
}

std::string FiniteWatch::what_is_not_finite(Step& step) {
  if (!step.answer) ask(step);
  if (const c10::Event* const arrival = step.answer->arrival()) wait_for(rank_, *arrival);
  const double answer = step.answer->values().item<double>();
  if (!on_gpu()) mark_.zero_();
  if (on_gpu() ? answer == 0 : std::isfinite(answer)) return "";
  const at::Tensor finite =
      of_all_ranks(rank_, {std::isfinite((step.loss ? step.loss->values() : loss_).item<double>()) ? 1 : 0});
  std::string ranks;
  for (int64_t rank = 0; rank < finite.size(0); ++rank) {
    if (finite[rank][0].item<int64_t>() == 0) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  }
  return "epoch " + std::to_string(epoch_) + ", step " + std::to_string(step.number) + ": " +
         (ranks.empty() ? "the gradients are not finite, though the loss is, on every rank"
                        : "the loss of rank " + ranks + " is not finite");
}

}  // namespace lockstep
