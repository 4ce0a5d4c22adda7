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
