#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/devices/devices.hpp>
#include <lockstep/scratch/split_batch.hpp>

#include <limits>

#include "data/parts.hpp"
#include "support/error_of.hpp"

namespace lockstep {
namespace split_batch_test {

const c10::Device cpu(c10::kCPU);

TEST(PartOf, FirstPartsHoldOneMore) {
  EXPECT_EQ(part_of(10, 0, 3).begin, 0);
  EXPECT_EQ(part_of(10, 0, 3).end, 4);
  EXPECT_EQ(part_of(10, 1, 3).end, 7);
  EXPECT_EQ(part_of(10, 2, 3).end, 10);
}

TEST(PartOf, CoversEverySampleOnceInOrderWhateverTheCounts) {
  for (int64_t total = 0; total <= 40; ++total) {
    for (int count = 1; count <= 9; ++count) {
      int64_t next = 0;
      for (int i = 0; i < count; ++i) {
        const Range part = part_of(total, i, count);
        EXPECT_EQ(part.begin, next);
        EXPECT_EQ(part.size(), total / count + (i < total % count ? 1 : 0));
        next = part.end;
      }
      EXPECT_EQ(next, total);
    }
  }
}

TEST(PartOf, HasNoOverflowForLargeTotals) {
  const int64_t total = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(part_of(total, 1023, 1024).end, total);
}

TEST(PartOf, RefusesPartsThatDoNotExist) {
  EXPECT_THAT(error_of([] { part_of(10, 3, 3); }), Refused());
  EXPECT_THAT(error_of([] { part_of(10, -1, 3); }), Refused());
  EXPECT_THAT(error_of([] { part_of(10, 0, 0); }), Refused());
  EXPECT_THAT(error_of([] { part_of(-1, 0, 1); }), Refused());
}

TEST(SplitAndLoad, GivesTheSectionsRows) {
  const auto data = torch::arange(20).view({4, 5});
  const auto parts = split_and_load(data, Devices(2, cpu));
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_TRUE(parts[0].equal(torch::arange(10).view({2, 5})));
  EXPECT_TRUE(parts[1].equal(torch::arange(10, 20).view({2, 5})));
}

TEST(SplitAndLoad, PutsTheDataTogetherAgainForRandomShapes) {
  torch::manual_seed(1);
  for (int count = 1; count <= 5; ++count) {
    for (int64_t samples : {0, 1, 2, 3, 4, 5, 7, 12, 33}) {
      const auto data = torch::randn({samples, torch::randint(1, 5, {1}).item<int64_t>(), 3});
      const auto parts = split_and_load(data, Devices(count, cpu));
      ASSERT_EQ(parts.size(), static_cast<size_t>(count));
      EXPECT_TRUE(torch::cat(parts).equal(data));
      EXPECT_LE(parts.front().size(0) - parts.back().size(0), 1);
    }
  }
}

TEST(SplitAndLoad, GivesViewsWhereTheDataAlreadyLie) {
  const auto data = torch::zeros({4, 2});
  split_and_load(data, Devices(2, cpu))[1].fill_(1);
  EXPECT_EQ(data.sum().item<float>(), 4);
}

TEST(SplitAndLoad, GivesEmptyPartsWhenThereAreFewerSamplesThanDevices) {
  const auto parts = split_and_load(torch::arange(2), Devices(4, cpu));
  EXPECT_EQ(parts[1].item<int64_t>(), 1);
  EXPECT_EQ(parts[2].sizes(), at::IntArrayRef({0}));
  EXPECT_EQ(parts[3].sizes(), at::IntArrayRef({0}));
}

TEST(SplitAndLoad, RefusesAnUnevenCountWhenEvenIsRequired) {
  EXPECT_THAT(error_of([] { split_and_load(torch::zeros({7, 2}), Devices(2, cpu), Parts::even); }), Refused());
  EXPECT_EQ(split_and_load(torch::zeros({8, 2}), Devices(2, cpu), Parts::even).size(), 2u);
}

TEST(SplitAndLoad, RefusesWhatCannotBeSplit) {
  EXPECT_THAT(error_of([] { split_and_load(torch::zeros({4}), {}); }), Refused());
  EXPECT_THAT(error_of([] { split_and_load(torch::tensor(1.0), {cpu}); }), Refused());
  EXPECT_THAT(error_of([] { split_and_load(torch::Tensor(), {cpu}); }), Refused());
}

TEST(SplitAndLoad, NamesTheDeviceThatIsNotThere) {
  if (torch::cuda::device_count() > 7) GTEST_SKIP() << "this machine has the GPU that the test wants to miss";
  EXPECT_THAT(error_of([] { split_and_load(torch::zeros({4}), {cpu, c10::Device("cuda:7")}); }), Fails(Error::machine));
}

TEST(SplitBatch, SplitsSamplesAndLabelsAlike) {
  const auto x = torch::arange(10).view({5, 2});
  const auto y = torch::arange(5);
  const auto [xs, ys] = split_batch(x, y, Devices(3, cpu));
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE((xs[i].select(1, 0)).equal(ys[i] * 2));
  EXPECT_EQ(ys[2].item<int64_t>(), 4);
}

TEST(SplitBatch, RefusesDifferentCountsWithBothNumbers) {
  EXPECT_THAT(error_of([] { split_batch(torch::zeros({5, 2}), torch::zeros({4}), Devices(2, cpu)); }), Refused());
  EXPECT_THAT(error_of([] { split_batch(torch::zeros({5}), torch::zeros({5}), Devices(2, cpu), Parts::even); }),
              Refused());
}

}  // namespace split_batch_test
}  // namespace lockstep
