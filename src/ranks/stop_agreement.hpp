// A StopAgreement lets all ranks stop after the same step, though each hears of the request at another moment.
//
// The ranks ask each other every few steps, about four times a second, since an exchange in each step would cost small
// networks too much. All ranks learn from the slowest one how many steps lie in between. If nobody can ask any rank to
// stop, they ask in now() alone.
#pragma once

#include <lockstep/ranks/rank.hpp>

#include <chrono>
#include <cstdint>
#include <stop_token>
#include <utility>

namespace lockstep {

class StopAgreement {
 public:
  StopAgreement(const Rank& rank, std::stop_token stop) : rank_(rank), stop_(std::move(stop)) {}

  // Gives whether any rank was asked to stop. Call each of these on all ranks alike; all get the same answer.
  bool now();
  bool after_step();  // gives false while it is not time to ask

 private:
  using Clock = std::chrono::steady_clock;

  Rank rank_;
  const std::stop_token stop_;
  Clock::time_point asked_ = Clock::now();
  int64_t steps_ = 0;     // steps since asked_
  int64_t interval_ = 1;  // steps until the next time
  bool can_stop_ = true;  // some rank can be asked to stop, as far as is known
};

}  // namespace lockstep
