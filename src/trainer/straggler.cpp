#include "straggler.hpp"

#include <algorithm>
#include <cstdio>

namespace lockstep {
namespace {

constexpr double kTimesAsLong = 3;
constexpr double kSecondsPerEpoch = 1;

double per_sample(const RankTime& time) {
  return time.seconds / static_cast<double>(time.samples);
}

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", seconds);
  return text;
}

}  // namespace

std::string straggler_of(const std::vector<RankTime>& ranks, int64_t epochs, const std::vector<std::string>& names) {
  std::vector<size_t> order;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].samples > 0) order.push_back(rank);
  }
  if (order.size() < 2 || epochs < 1) return "";
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return per_sample(ranks[a]) < per_sample(ranks[b]); });
  const size_t slowest = order.back();
  order.pop_back();
  const RankTime& slow = ranks[slowest];
  const double usual = per_sample(ranks[order[order.size() / 2]]) * static_cast<double>(slow.samples);
  const auto per_epoch = [&](double seconds) { return seconds / static_cast<double>(epochs); };
  if (slow.seconds < kTimesAsLong * usual || per_epoch(slow.seconds - usual) < kSecondsPerEpoch) return "";
  return names[slowest] + " is slow: it computed for " + seconds_text(per_epoch(slow.seconds)) +
         " s per epoch, where others take " + seconds_text(per_epoch(usual)) +
         " s for as many samples; they waited for it";
}

}  // namespace lockstep
