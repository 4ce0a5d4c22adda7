// The parts that follow from times: simulated devices whose step of n samples costs a + b n seconds.
#include "lab/rebalance.hpp"

#include <gmock/gmock.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace lockstep {
namespace rebalance_test {

using testing::ElementsAre;
using Sizes = std::vector<int64_t>;

struct Device {
  double fixed, per_sample;
  double seconds(int64_t samples) const { return fixed + per_sample * static_cast<double>(samples); }
};

std::vector<double> seconds_of(const std::vector<Device>& devices, const Sizes& sizes) {
  std::vector<double> seconds;
  for (size_t i = 0; i < sizes.size(); ++i) seconds.push_back(devices[i].seconds(sizes[i]));
  return seconds;
}

double slowest(const std::vector<Device>& devices, const Sizes& sizes) {
  const auto seconds = seconds_of(devices, sizes);
  return *std::max_element(seconds.begin(), seconds.end());
}

// The shortest step of all whole parts of at least one sample: each sample to the device that has it done first.
double best(const std::vector<Device>& devices, int64_t total) {
  Sizes sizes(devices.size(), 1);
  for (auto left = total - static_cast<int64_t>(devices.size()); left > 0; --left) {
    size_t first = 0;
    for (size_t i = 1; i < devices.size(); ++i) {
      if (devices[i].seconds(sizes[i] + 1) < devices[first].seconds(sizes[first] + 1)) first = i;
    }
    ++sizes[first];
  }
  return slowest(devices, sizes);
}

Sizes after_looks(int looks, const std::vector<Device>& devices, Sizes sizes) {
  for (int look = 0; look < looks; ++look) sizes = rebalanced(sizes, seconds_of(devices, sizes));
  return sizes;
}

TEST(Rebalanced, OneLookIsEnoughWithoutFixedCosts) {
  EXPECT_THAT(after_looks(1, {{0, 1}, {0, 2}}, {128, 128}), ElementsAre(171, 85));
  EXPECT_THAT(after_looks(1, {{0, 2}, {0, 1}, {0, 4}}, {28, 28, 28}), ElementsAre(24, 48, 12));
}

TEST(Rebalanced, RestsWhereTimesAreEqual) {
  EXPECT_THAT(rebalanced({171, 85}, {1.71, 1.70}), ElementsAre(171, 85));
  EXPECT_THAT(rebalanced({5, 3}, {5, 6}), ElementsAre(5, 3));  // 6 and 2 would take 6 as well
}

TEST(Rebalanced, ComesNearTheShortestStepWhateverTheFixedCosts) {
  std::mt19937 random(1);
  std::uniform_real_distribution<double> fixed(0, 60), per_sample(0.5, 4);
  for (int run = 0; run < 300; ++run) {
    std::vector<Device> devices(2 + random() % 4);
    for (auto& device : devices) device = {fixed(random), per_sample(random)};
    const auto count = static_cast<int64_t>(devices.size());
    Sizes sizes(devices.size(), 256 / count);
    sizes[0] += 256 % count;
    const Sizes rest = after_looks(12, devices, sizes);
    EXPECT_EQ(std::accumulate(rest.begin(), rest.end(), int64_t{0}), 256);
    EXPECT_LT(slowest(devices, rest), 1.06 * best(devices, 256)) << "run " << run;
  }
}

TEST(Rebalanced, SpeedsMeasuredOnceWouldNotDo) {
  const std::vector<Device> devices = {{1, 1}, {150, 1}};
  EXPECT_GT(slowest(devices, after_looks(1, devices, {128, 128})), 1.1 * best(devices, 256));
  EXPECT_LT(slowest(devices, after_looks(6, devices, {128, 128})), 1.04 * best(devices, 256));
}

TEST(Rebalanced, FollowsADeviceThatChangesItsSpeed) {
  Sizes sizes = after_looks(2, {{5, 1}, {5, 1}}, {128, 128});
  EXPECT_THAT(sizes, ElementsAre(128, 128));
  const std::vector<Device> slower = {{5, 1}, {5, 3}};
  sizes = after_looks(4, slower, sizes);
  EXPECT_LT(slowest(slower, sizes), 1.04 * best(slower, 256));
  const std::vector<Device> back = {{5, 1}, {5, 1}};
  sizes = after_looks(4, back, sizes);
  EXPECT_LT(slowest(back, sizes), 1.04 * best(back, 256));
}

TEST(Rebalanced, NoiseDoesNotMakeItSwing) {
  std::mt19937 random(2);
  std::normal_distribution<double> noise(1, 0.03);
  const std::vector<Device> devices = {{3, 1}, {3, 2}, {3, 2}};
  Sizes sizes = after_looks(4, devices, {86, 85, 85});
  double sum = 0, worst = 0;
  for (int look = 0; look < 1000; ++look) {
    auto seconds = seconds_of(devices, sizes);
    for (auto& time : seconds) time *= noise(random);
    sizes = rebalanced(sizes, seconds);
    sum += slowest(devices, sizes) / best(devices, 256) / 1000;
    worst = std::max(worst, slowest(devices, sizes) / best(devices, 256));
  }
  EXPECT_LT(sum, 1.04);
  EXPECT_LT(worst, 1.12);
}

TEST(Rebalanced, EachRankKeepsASampleAndGetsOthersBack) {
  EXPECT_THAT(after_looks(20, {{0, 1}, {1000, 1}}, {16, 16}), ElementsAre(31, 1));
  EXPECT_THAT(after_looks(3, {{0, 1}, {0, 1}}, {31, 1}), ElementsAre(16, 16));
  EXPECT_THAT(after_looks(3, {{0, 1}, {0, 1e6}, {0, 1e6}}, {1, 1, 1}), ElementsAre(1, 1, 1));
}

TEST(Rebalanced, LeavesPartsThatWereNotMeasured) {
  EXPECT_THAT(rebalanced({4, 0}, {1, 1e-6}), ElementsAre(4, 0));
  EXPECT_THAT(rebalanced({2, 2}, {0, 1}), ElementsAre(2, 2));
  EXPECT_THAT(rebalanced({4}, {1}), ElementsAre(4));
}

}  // namespace rebalance_test
}  // namespace lockstep
