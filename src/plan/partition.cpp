#include "partition.hpp"

#include <algorithm>
#include <functional>
#include <limits>

namespace lockstep {
namespace {

constexpr double impossible = std::numeric_limits<double>::infinity();

struct StageCost {
  double seconds = 0;
  double bytes = 0;
};

// Gives the cost of a stage of the layers first … end - 1 in constant time, from tables over all such ranges.
class Costs {
 public:
  explicit Costs(const Partition& partition)
      : partition_(partition), count_(partition.layers.size()), ranges_(count_ * count_) {
    for (size_t first = 0; first < count_; ++first) {
      Range range;
      for (size_t last = first; last < count_; ++last) {
        const auto& layer = partition.layers[last];
        range.seconds += layer.seconds;
        range.fixed += layer.fixed_bytes;
        range.live += layer.live_bytes;
        range.workspace = std::max(range.workspace, layer.workspace_bytes);
        ranges_[first * count_ + last] = range;
      }
    }
  }

  StageCost of(int stage, int64_t first, int64_t end) const {
    const auto& device = partition_.stages[static_cast<size_t>(stage)];
    const Range& range = ranges_[static_cast<size_t>(first) * count_ + static_cast<size_t>(end) - 1];
    StageCost cost{range.seconds / device.speed, range.fixed + range.workspace};
    double live = range.live;
    if (first > 0) {
      cost.seconds += layer(first - 1).cut_seconds;
      live += layer(first - 1).cut_bytes;
    }
    if (end < static_cast<int64_t>(count_)) cost.seconds += layer(end - 1).cut_seconds;
    cost.bytes += device.live_microbatches * live;
    return cost;
  }

  bool fits(int stage, int64_t first, int64_t end) const {
    const double limit = partition_.stages[static_cast<size_t>(stage)].memory_bytes;
    return limit <= 0 || of(stage, first, end).bytes <= limit;
  }

 private:
  struct Range {
    double seconds = 0, fixed = 0, live = 0, workspace = 0;
  };

  const Partition::Layer& layer(int64_t index) const { return partition_.layers[static_cast<size_t>(index)]; }

  const Partition& partition_;
  const size_t count_;
  std::vector<Range> ranges_;
};

using CostOfStage = std::function<double(int stage, int64_t first, int64_t end)>;
using Combine = std::function<double(double before, double stage)>;

struct Best {
  double cost = impossible;
  std::vector<int64_t> cuts;
};

// Bellman's recursion: best[s][j] is the lowest cost of making s stages of the first j layers. It is the least over i
// of combine(best[s - 1][i], cost of layers i … j - 1 as stage s - 1). This is exact, because both combinations used
// here, maximum and sum, never fall when an argument grows.
Best best_partition(int64_t layers, int stages, const CostOfStage& cost, const Combine& combine) {
  const auto rows = static_cast<size_t>(stages) + 1, columns = static_cast<size_t>(layers) + 1;
  std::vector<std::vector<double>> best(rows, std::vector<double>(columns, impossible));
  std::vector<std::vector<int64_t>> first_of_last(rows, std::vector<int64_t>(columns, 0));
  best[0][0] = 0;
  for (int s = 1; s <= stages; ++s) {
    for (int64_t end = s; end <= layers - (stages - s); ++end) {
      for (int64_t first = s - 1; first < end; ++first) {
        if (best[s - 1][first] == impossible) continue;
        const double value = combine(best[s - 1][first], cost(s - 1, first, end));
        if (value >= best[s][end]) continue;
        best[s][end] = value;
        first_of_last[s][end] = first;
      }
    }
  }
  Best result{best[stages][layers], {}};
  if (result.cost == impossible) return result;
  int64_t end = layers;
  for (int s = stages; s > 1; --s) {
    end = first_of_last[s][end];
    result.cuts.insert(result.cuts.begin(), end);
  }
  return result;
}

const Combine largest = [](double before, double stage) { return std::max(before, stage); };
const Combine sum = [](double before, double stage) { return before + stage; };

}  // namespace

std::optional<std::vector<int64_t>> fitting_stages(const Partition& partition) {
  const auto layers = static_cast<int64_t>(partition.layers.size());
  const int stages = static_cast<int>(partition.stages.size());
  const Costs costs(partition);
  const auto seconds = [&](int stage, int64_t first, int64_t end) {
    return costs.fits(stage, first, end) ? costs.of(stage, first, end).seconds : impossible;
  };
  const double slowest = best_partition(layers, stages, seconds, largest).cost;
  if (slowest == impossible) return {};

  const auto crossing = [&](int stage, int64_t first, int64_t end) {
    if (seconds(stage, first, end) > slowest) return impossible;
    return end < layers ? partition.layers[static_cast<size_t>(end) - 1].cut_seconds : 0;
  };
  return best_partition(layers, stages, crossing, sum).cuts;
}

std::vector<int64_t> leanest_stages(const Partition& partition) {
  const Costs costs(partition);
  const auto filling = [&](int stage, int64_t first, int64_t end) {
    const double limit = partition.stages[static_cast<size_t>(stage)].memory_bytes;
    return limit > 0 ? costs.of(stage, first, end).bytes / limit : 0;
  };
  return best_partition(static_cast<int64_t>(partition.layers.size()), static_cast<int>(partition.stages.size()),
                        filling, largest)
      .cuts;
}

}  // namespace lockstep
