// StepTraffic counts the bytes that a rank's steps send to the others, without other bytes that it sends meanwhile.
#pragma once

#include <lockstep/ranks/traffic.hpp>

#include "ranks/observed_backend.hpp"

#include <cstdint>
#include <memory>
#include <utility>

namespace lockstep {

class StepTraffic {
 public:
  // Steps that a graph replays make no calls, so nobody can count them: `counts` is false then. `other`, if any, is
  // told of the calls too.
  StepTraffic(const Rank& rank, bool counts, std::shared_ptr<CallObserver> other)
      : traffic_(counts ? std::make_shared<Traffic>() : nullptr),
        rank_(observed(rank, {std::move(other), counts ? observer_for(traffic_) : nullptr})) {}

  Rank& rank() { return rank_; }  // gives the rank whose calls are counted

  void begin() {
    steps_ = 0;
    if (traffic_) *traffic_ = {};
  }
  void step_done() { ++steps_; }

  // Does `work`, and does not count the bytes that this sends.
  template <class Work>
  void leave_out(const Work& work) {
    const double sent = traffic_ ? traffic_->sent : 0;
    work();
    if (traffic_) traffic_->sent = sent;
  }

  // Gives the bytes sent per step; 0 if nobody counts them, and before the first step.
  double per_step() const { return traffic_ && steps_ > 0 ? traffic_->sent / static_cast<double>(steps_) : 0; }

 private:
  const std::shared_ptr<Traffic> traffic_;  // the traffic; null: it is not counted
  Rank rank_;
  int64_t steps_ = 0;
};

}  // namespace lockstep
