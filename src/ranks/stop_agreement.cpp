#include "stop_agreement.hpp"

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "gather.hpp"

namespace lockstep {

bool StopAgreement::now() {
  if (rank_.world_size() == 1) return stop_.stop_requested();
  constexpr int64_t between = 250'000;  // microseconds
  const auto taken = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - asked_).count();
  const at::Tensor all =
      of_all_ranks(rank_, {stop_.stop_requested() ? 1 : 0, static_cast<int64_t>(taken), stop_.stop_possible() ? 1 : 0});
  if (steps_ > 0) {  // the first steps say little, so the interval doubles at most
    const int64_t slowest = std::max<int64_t>(all.select(1, 1).max().item<int64_t>() / steps_, 1);
    interval_ = std::clamp<int64_t>(between / slowest, 1, 2 * interval_);
  }
  steps_ = 0;
  asked_ = Clock::now();
  can_stop_ = all.select(1, 2).max().item<int64_t>() > 0;
  return all.select(1, 0).max().item<int64_t>() > 0;
}

bool StopAgreement::after_step() {
  return can_stop_ && ++steps_ >= (rank_.world_size() == 1 ? 1 : interval_) && now();
}

}  // namespace lockstep
