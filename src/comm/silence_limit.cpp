#include "silence_limit.hpp"

#include <algorithm>
#include <utility>

namespace lockstep::comm {

using std::chrono::milliseconds;

SilenceRange silence_range(milliseconds silence) {
  return silence == milliseconds::zero() ? kSilence : SilenceRange{silence, silence};
}

void SilenceLimit::beat(Clock::time_point now) {
  const auto before = std::exchange(beaten_, now);
  if (before == Clock::time_point()) return;
  if (first_ == Clock::time_point()) first_ = since_ = now;
  if (now - since_ >= kRemembers) {
    longest_before_ = std::exchange(longest_, {});
    since_ = now;
  }
  longest_ = std::max(longest_, now - before);
}

milliseconds SilenceLimit::limit() const {
  if (first_ == Clock::time_point() || beaten_ - first_ < kLearns) return range_.most;
  const auto wanted = std::chrono::ceil<milliseconds>(kTimes * std::max(longest_, longest_before_));
  return std::clamp(wanted, range_.least, range_.most);
}

}  // namespace lockstep::comm
