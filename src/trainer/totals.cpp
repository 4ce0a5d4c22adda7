#include "totals.hpp"

#include <ATen/ops/cat.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "ranks/rank_wait.hpp"

#include <utility>

namespace lockstep {

Totals::Totals(const c10::Device& device, bool counts_loss)
    : loss(at::zeros({}, at::TensorOptions(device).dtype(at::kDouble))),
      grain_losses(device),
      right(at::zeros({1}, at::TensorOptions(device).dtype(at::kLong))),
      counts_loss(counts_loss) {}

void Totals::reset() {
  loss.zero_();
  grain_losses.reset();
  right.zero_();
  brought = 0;
  samples = 0;
  known = {};
  left_out = 0;
}

void Totals::add_loss(const at::Tensor& mean, int64_t samples_of_it) {
  const c10::NoGradGuard no_grad;
  loss.add_(mean.detach(), static_cast<double>(samples_of_it));
}

// On a GPU a sum in each step would be two kernels more.
void Totals::add_right(const at::Tensor& answers) {
  const c10::NoGradGuard no_grad;
  if (answers.size(0) > right.size(0)) {
    const at::Tensor before = std::exchange(right, at::zeros(answers.sizes(), right.options()));
    right.narrow(0, 0, before.size(0)).copy_(before);
  }
  right.narrow(0, 0, answers.size(0)).add_(answers);
}

at::Tensor Totals::loss_that_counts() const {
  return counts_loss ? loss.clone() : at::full_like(loss, brought);
}

at::Tensor Totals::correct() const {
  return right.sum();
}

void Totals::share(Rank& rank) {
  const c10::NoGradGuard no_grad;
  const at::Tensor cells = grain_losses.cells();
  const at::Tensor all = at::cat({cells, correct().to(at::kDouble).view({1})});
  rank.allreduce(all);
  synchronize(rank);  // a GPU's values may be those of a call that a lost rank has ended
  known.loss = grain_losses.take(all.narrow(0, 0, cells.numel()));
  known.correct = static_cast<int64_t>(all[cells.numel()].item<double>());
}

double Totals::mean_loss() const {
  return samples == 0 ? 0.0 : loss.item<double>() / static_cast<double>(samples);
}

std::vector<double> Totals::save() const {
  return {loss_that_counts().item<double>(), static_cast<double>(correct().item<int64_t>()),
          static_cast<double>(samples)};
}

void Totals::load(const at::Tensor& numbers) {
  const double sum = numbers[0].item<double>();
  counts_loss ? void(loss.fill_(sum)) : void(brought = sum);
  right.zero_();
  right[0] = static_cast<int64_t>(numbers[1].item<double>());
  samples = static_cast<int64_t>(numbers[2].item<double>());
}

void GrainLosses::reset(double sum) {
  sum_ = sum;
  rows_.clear();
}

void GrainLosses::begin_step(int64_t grains) {
  rows_.push_back(at::zeros({grains}, at::TensorOptions(device_).dtype(at::kDouble)));
}

void GrainLosses::add(int64_t grain, const at::Tensor& mean, int64_t samples_of_it) {
  const c10::NoGradGuard no_grad;
  const auto samples = static_cast<double>(samples_of_it);
  const at::Tensor& row = rows_.back();
  if (row.is_cpu()) {  // a CPU's number can be looked at, which takes less than operators do
    row.mutable_data_ptr<double>()[grain] += mean.item<double>() * samples;
  } else {
    row[grain].add_(mean.detach(), samples);
  }
}

void GrainLosses::drop_step() {
  if (!rows_.empty()) rows_.pop_back();
}

at::Tensor GrainLosses::take_row() {
  at::Tensor row = std::move(rows_.back());
  rows_.pop_back();
  return row;
}

double GrainLosses::sum(Rank& rank) {
  if (rows_.empty()) return sum_;
  const c10::NoGradGuard no_grad;
  const at::Tensor all = cells();
  rank.allreduce(all);
  return take(all);
}

at::Tensor GrainLosses::cells() const {
  return at::cat(rows_);
}

double GrainLosses::take(const at::Tensor& cells) {
  const at::Tensor here = cells.cpu();
  const double* const losses = here.const_data_ptr<double>();
  for (int64_t cell = 0; cell < here.numel(); ++cell) sum_ += losses[cell];
  rows_.clear();
  return sum_;
}

}  // namespace lockstep
