#include "grain_losses.hpp"

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

namespace lockstep {

void GrainLosses::reset(double sum) {
  sum_ = sum;
  rows_.clear();
}

void GrainLosses::begin_step(int64_t grains) {
  rows_.push_back(at::zeros({grains}, at::TensorOptions(device_).dtype(at::kDouble)));
}

void GrainLosses::add(int64_t grain, const at::Tensor& mean, int64_t samples_of_it) {
  const c10::NoGradGuard no_grad;
  rows_.back()[grain].add_(mean.detach(), static_cast<double>(samples_of_it));
}

void GrainLosses::drop_step() {
  if (!rows_.empty()) rows_.pop_back();
}

double GrainLosses::sum(Rank& rank) {
  if (rows_.empty()) return sum_;
  const c10::NoGradGuard no_grad;
  const at::Tensor cells = at::cat(rows_);
  rank.allreduce(cells);
  const at::Tensor here = cells.cpu();
  const double* const losses = here.const_data_ptr<double>();
  for (int64_t cell = 0; cell < here.numel(); ++cell) sum_ += losses[cell];
  rows_.clear();
  return sum_;
}

}  // namespace lockstep
