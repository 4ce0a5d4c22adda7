#include "totals.hpp"

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "ranks/rank_wait.hpp"

namespace lockstep {

Totals::Totals(const c10::Device& device)
    : loss(at::zeros({}, at::TensorOptions(device).dtype(at::kDouble))),
      grain_losses(device),
      correct(at::zeros({}, at::TensorOptions(device).dtype(at::kLong))) {}

void Totals::reset() {
  loss.zero_();
  grain_losses.reset();
  correct.zero_();
  samples = 0;
  known = {};
  left_out = 0;
}

void Totals::add_loss(const at::Tensor& mean, int64_t samples_of_it) {
  const c10::NoGradGuard no_grad;
  loss.add_(mean.detach() * static_cast<double>(samples_of_it));
}

void Totals::add_correct(const at::Tensor& answers) {
  correct.add_(answers);
}

void Totals::share(Rank& rank) {
  const c10::NoGradGuard no_grad;
  const at::Tensor cells = grain_losses.cells();
  const at::Tensor all = at::cat({cells, correct.to(at::kDouble).view({1})});
  rank.allreduce(all);
  synchronize(rank);  // a GPU's values may be those of a call that a lost rank has ended
  known.loss = grain_losses.take(all.narrow(0, 0, cells.numel()));
  known.correct = static_cast<int64_t>(all[cells.numel()].item<double>());
}

double Totals::mean_loss() const {
  return samples == 0 ? 0.0 : loss.item<double>() / static_cast<double>(samples);
}

std::vector<double> Totals::save() const {
  return {loss.item<double>(), static_cast<double>(correct.item<int64_t>()), static_cast<double>(samples)};
}

void Totals::load(const at::Tensor& numbers) {
  loss.fill_(numbers[0].item<double>());
  correct.fill_(static_cast<int64_t>(numbers[1].item<double>()));
  samples = static_cast<int64_t>(numbers[2].item<double>());
}

}  // namespace lockstep
