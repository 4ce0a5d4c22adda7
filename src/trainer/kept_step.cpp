#include "kept_step.hpp"

#include "ranks/gather.hpp"

#include <algorithm>

namespace lockstep {

std::vector<int64_t> runs_around(const std::vector<Range>& kept, int64_t grains) {
  const int ranks = static_cast<int>(kept.size());
  std::vector<int64_t> runs{0};
  int64_t gap = 0;  // where it begins
  for (int left = -1, right = 0; right <= ranks; ++right) {
    const bool is_last = right == ranks;
    const Range next = is_last ? Range{grains, grains} : kept[static_cast<size_t>(right)];
    if (!is_last && next.size() == 0) continue;
    if (next.begin < gap || next.end > grains || (is_last && left < 0)) return {};
    const int takers = right - left - 1 + (left < 0 ? 0 : 1) + (is_last ? 0 : 1);
    for (int rank = std::max(left, 0), taker = 0; rank < right; ++rank, ++taker) {
      runs.push_back(gap + part_of(next.begin - gap, taker, takers).end);
    }
    left = right;
    gap = next.end;
  }
  return runs;
}

std::vector<int64_t> agreed_runs(std::optional<KeptStep>& kept, int epoch, int64_t steps, int64_t grains, Rank& rank) {
  if (kept && (kept->epoch != epoch || kept->steps != steps)) kept.reset();
  const Range mine = kept ? kept->grains->grains : Range();
  const at::Tensor all = of_all_ranks(rank, {mine.begin, mine.end});
  std::vector<Range> ranges;
  for (int other = 0; other < rank.world_size(); ++other) {
    ranges.push_back({all[other][0].item<int64_t>(), all[other][1].item<int64_t>()});
  }
  auto runs = runs_around(ranges, grains);
  if (runs.empty()) kept.reset();
  return runs;
}

std::vector<double> sizes_of(const std::vector<int64_t>& runs) {
  std::vector<double> sizes;
  for (size_t rank = 1; rank < runs.size(); ++rank) sizes.push_back(static_cast<double>(runs[rank] - runs[rank - 1]));
  return sizes;
}

}  // namespace lockstep
