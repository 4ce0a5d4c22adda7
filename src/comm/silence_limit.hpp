// SilenceLimit: how long somebody who beats may be silent until he counts as dead. It follows the longest gap between
// beats that was seen lately, so it is short on a quiet machine and longer on a busy one (a simple relative of
// Hayashibara's accrual failure detector, SRDS 2004).
//
// Whoever beats knows his own gaps best, and tells his limit with each beat. Whoever watches has one too, of his own
// looks: if he was late, so may the others be. The longest of these counts. Used by one thread.
#pragma once

#include <chrono>

namespace lockstep::comm {

// Equal ones fix the limit.
struct SilenceRange {
  std::chrono::milliseconds least, most;
};

inline constexpr SilenceRange kSilence{std::chrono::seconds(1), std::chrono::seconds(6)};  // of processes

// As RunOptions::silence says it; 0: kSilence.
SilenceRange silence_range(std::chrono::milliseconds silence);

class SilenceLimit {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr int kTimes = 4;                   // the limit, of the longest gap
  static constexpr std::chrono::seconds kLearns{2};  // from the first gap on: until then the limit is the longest one
  static constexpr std::chrono::seconds kRemembers{20};  // a gap; at most twice that

  explicit SilenceLimit(const SilenceRange& range) : range_(range) {}

  void beat(Clock::time_point now);  // or a look: the gap since the last one is noted

  std::chrono::milliseconds limit() const;

 private:
  SilenceRange range_;
  Clock::time_point first_ = {}, beaten_ = {};  // the end of the first gap; the last beat
  Clock::time_point since_ = {};                // longest_ is of gaps from here on
  Clock::duration longest_{}, longest_before_{};
};

}  // namespace lockstep::comm
