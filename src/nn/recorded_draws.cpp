#include "recorded_draws.hpp"

namespace lockstep {
namespace {

thread_local RecordedDraws* innermost_recorded_draws = nullptr;

}  // namespace

RecordedDraws::RecordedDraws(const at::Tensor& step) : step_(step), before_(innermost_recorded_draws) {
  innermost_recorded_draws = this;
}

RecordedDraws::~RecordedDraws() {
  innermost_recorded_draws = before_;
}

at::Tensor RecordedDraws::step() {
  if (innermost_recorded_draws == nullptr) return {};
  innermost_recorded_draws->any_ = true;
  return innermost_recorded_draws->step_;
}

}  // namespace lockstep
