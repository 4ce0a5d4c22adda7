// A SilenceLimit says how long a process that beats may be silent before it counts as dead. The limit follows the
// longest gap between beats that was seen lately: short on a quiet machine, longer on a busy one. (This is a simple
// relative of Hayashibara's accrual failure detector, SRDS 2004.)
//
// A process that beats knows its own gaps best, and sends the limit with each beat. A process that watches keeps a
// limit of its own looks: if these are late, the others' beats may be late too. The longest of these limits counts. Use
// it from one thread.
#pragma once

#include <chrono>

namespace lockstep::comm {

// Equal values fix the limit.
struct SilenceRange {
  std::chrono::milliseconds least, most;
};

inline constexpr SilenceRange kSilence{std::chrono::seconds(1), std::chrono::seconds(6)};  // the range for processes

// Gives the range that RunOptions::silence asks for; 0 asks for kSilence.
SilenceRange silence_range(std::chrono::milliseconds silence);

class SilenceLimit {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr int kTimes = 4;                       // the limit is so many times the longest gap
  static constexpr std::chrono::seconds kLearns{2};      // the limit is range_.most until so long after the first gap
  static constexpr std::chrono::seconds kRemembers{20};  // a gap counts this long, or up to twice as long

  explicit SilenceLimit(const SilenceRange& range) : range_(range) {}

  void beat(Clock::time_point now);  // notes the gap since the last beat or look

  std::chrono::milliseconds limit() const;

 private:
  SilenceRange range_;
  Clock::time_point first_ = {}, beaten_ = {};  // the end of the first gap; the last beat
  Clock::time_point since_ = {};                // longest_ is the longest gap since then
  Clock::duration longest_{}, longest_before_{};
};

}  // namespace lockstep::comm
