// fitting_stages against all partitions there are.
#include "plan/partition.hpp"

#include <gmock/gmock.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <random>
#include <vector>

namespace partition_test {

using lockstep::fitting_stages;
using lockstep::Partition;
using testing::ElementsAre;

using Cuts = std::vector<int64_t>;

struct Value {
  bool fits = true;
  double slowest = 0;   // stage
  double crossing = 0;  // cost of all cuts
};

// Gives the value as partition.hpp defines it, added up layer by layer.
Value value_of(const Partition& partition, const Cuts& cuts) {
  Value value;
  const auto& layers = partition.layers;
  for (size_t s = 0; s < partition.stages.size(); ++s) {
    const auto& device = partition.stages[s];
    const size_t first = s == 0 ? 0 : static_cast<size_t>(cuts[s - 1]);
    const size_t end = s == cuts.size() ? layers.size() : static_cast<size_t>(cuts[s]);
    double seconds = 0, bytes = 0, workspace = 0;
    for (size_t i = first; i < end; ++i) {
      seconds += layers[i].seconds / device.speed;
      bytes += layers[i].fixed_bytes + device.live_microbatches * layers[i].live_bytes;
      workspace = std::max(workspace, layers[i].workspace_bytes);
    }
    if (first > 0) {
      seconds += layers[first - 1].cut_seconds;
      bytes += device.live_microbatches * layers[first - 1].cut_bytes;
    }
    if (end < layers.size()) {
      seconds += layers[end - 1].cut_seconds;
      value.crossing += layers[end - 1].cut_seconds;
    }
    value.slowest = std::max(value.slowest, seconds);
    if (device.memory_bytes > 0 && bytes + workspace > device.memory_bytes) value.fits = false;
  }
  return value;
}

// Calls visit(cuts) for every way to cut `layers` layers into `stages` stages.
template <class Visit>
void for_all_cuts(int64_t layers, int stages, const Visit& visit, Cuts cuts = {}) {
  if (static_cast<int>(cuts.size()) == stages - 1) return visit(cuts);
  for (int64_t cut = cuts.empty() ? 1 : cuts.back() + 1; cut < layers; ++cut) {
    cuts.push_back(cut);
    for_all_cuts(layers, stages, visit, cuts);
    cuts.pop_back();
  }
}

Partition random_partition(std::mt19937& random) {
  const auto number = [&](int least, int most) { return std::uniform_int_distribution<int>(least, most)(random); };
  Partition partition;
  const int layers = number(1, 10);
  for (int i = 0; i < layers; ++i) {
    partition.layers.push_back({.seconds = static_cast<double>(number(0, 20)),
                                .cut_seconds = static_cast<double>(number(0, 5)),
                                .fixed_bytes = static_cast<double>(number(0, 50)),
                                .live_bytes = static_cast<double>(number(0, 10)),
                                .cut_bytes = static_cast<double>(number(0, 10)),
                                .workspace_bytes = static_cast<double>(number(0, 20))});
  }
  const int stages = number(1, std::min(4, layers));
  const bool limited = number(0, 2) > 0;
  for (int s = 0; s < stages; ++s) {
    partition.stages.push_back({.speed = std::vector<double>{0.5, 1, 1, 2}[static_cast<size_t>(number(0, 3))],
                                .memory_bytes = limited ? static_cast<double>(number(60, 300)) : 0,
                                .live_microbatches = number(1, 4)});
  }
  return partition;
}

TEST(Partition, IsTheOptimumOfAllPartitionsOfRandomNets) {
  std::mt19937 random(1);
  int feasible = 0, infeasible = 0;
  for (int round = 0; round < 3000; ++round) {
    const Partition partition = random_partition(random);
    constexpr double none = std::numeric_limits<double>::infinity();
    Value best{.fits = false, .slowest = none, .crossing = none};
    for_all_cuts(
        static_cast<int64_t>(partition.layers.size()), static_cast<int>(partition.stages.size()),
        [&](const Cuts& cuts) {
          const Value value = value_of(partition, cuts);
          if (!value.fits) return;
          if (value.slowest < best.slowest || (value.slowest == best.slowest && value.crossing < best.crossing)) {
            best = value;
          }
        });
    if (!best.fits) {
      ++infeasible;
      EXPECT_EQ(fitting_stages(partition), std::nullopt);
      continue;
    }
    ++feasible;
    const Value found = value_of(partition, fitting_stages(partition).value());
    ASSERT_TRUE(found.fits) << "round " << round;
    ASSERT_EQ(found.slowest, best.slowest) << "round " << round;  // all numbers are exact in binary
    ASSERT_EQ(found.crossing, best.crossing) << "round " << round;
  }
  EXPECT_GT(feasible, 1000);
  EXPECT_GT(infeasible, 100);
}

Partition of_seconds(const std::vector<double>& seconds, const std::vector<double>& speeds) {
  Partition partition;
  for (const double s : seconds) partition.layers.push_back({.seconds = s});
  for (const double s : speeds) partition.stages.push_back({.speed = s});
  return partition;
}

TEST(Partition, AFasterDeviceGetsMore) {
  EXPECT_THAT(*fitting_stages(of_seconds({1, 1, 1, 1, 1, 1}, {1, 1})), ElementsAre(3));
  EXPECT_THAT(*fitting_stages(of_seconds({1, 1, 1, 1, 1, 1}, {2, 1})), ElementsAre(4));
  EXPECT_THAT(*fitting_stages(of_seconds({1, 1, 1, 1, 1, 1}, {1, 2})), ElementsAre(2));
}

TEST(Partition, OfEquallyFastOnesTheCheapestCutsAreTaken) {
  Partition partition = of_seconds({9, 1, 1, 1}, {1, 1});  // the first layer decides
  partition.layers[0].cut_seconds = 3;
  EXPECT_THAT(*fitting_stages(partition), ElementsAre(2));
}

TEST(Partition, OneStageHasNoCuts) {
  EXPECT_THAT(*fitting_stages(of_seconds({1, 2}, {1})), ElementsAre());
}

TEST(Partition, LongNetsTakeNoTime) {
  std::mt19937 random(1);
  std::vector<double> seconds(300);
  for (auto& s : seconds) s = 1 + static_cast<double>(random() % 8);
  EXPECT_EQ(fitting_stages(of_seconds(seconds, std::vector<double>(64, 1)))->size(), 63u);
}

}  // namespace partition_test
