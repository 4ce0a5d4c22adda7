#include "rebalance.hpp"

#include "data/parts.hpp"

#include <algorithm>
#include <numeric>

namespace lockstep {
namespace {

constexpr double equal_enough = 1.03, far_from_equal = 1.1;  // the slowest time over that of equal times

void give_each_one(std::vector<int64_t>& sizes) {
  for (auto& size : sizes) {
    if (size > 0) continue;
    --*std::max_element(sizes.begin(), sizes.end());
    size = 1;
  }
}

}  // namespace

std::vector<int64_t> rebalanced(const std::vector<int64_t>& sizes, const std::vector<double>& seconds) {
  const auto positive = [](auto number) { return number > 0; };
  if (!std::all_of(sizes.begin(), sizes.end(), positive) || !std::all_of(seconds.begin(), seconds.end(), positive)) {
    return sizes;
  }
  std::vector<double> speeds;
  for (size_t rank = 0; rank < sizes.size(); ++rank) speeds.push_back(static_cast<double>(sizes[rank]) / seconds[rank]);
  const double speed = std::accumulate(speeds.begin(), speeds.end(), 0.0);
  const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  const double slowest = *std::max_element(seconds.begin(), seconds.end());
  const double above_equal = slowest * speed / static_cast<double>(total);
  if (above_equal < equal_enough) return sizes;

  for (const double way : {0.5, 1.0}) {
    if (way < 1 && above_equal > far_from_equal) continue;
    std::vector<double> shares;
    for (size_t rank = 0; rank < sizes.size(); ++rank) {
      const double present = static_cast<double>(sizes[rank]) / static_cast<double>(total);
      shares.push_back(present + way * (speeds[rank] / speed - present));
    }
    auto next = sizes_by_shares(total, shares);
    give_each_one(next);
    double promised = 0;
    for (size_t rank = 0; rank < sizes.size(); ++rank) {
      promised = std::max(promised, static_cast<double>(next[rank]) / speeds[rank]);
    }
    if (next != sizes && promised < slowest) return next;
  }
  return sizes;
}

}  // namespace lockstep
