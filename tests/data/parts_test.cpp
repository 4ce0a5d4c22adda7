// Parts by shares: sizes by the method of the largest remainder, and batches that are cut so.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>

#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "data/parts.hpp"
#include "support/error_of.hpp"

namespace lockstep {
namespace parts_test {

using testing::ElementsAre;
using Shares = std::vector<double>;

TEST(Shares, WhatRoundingDownLeavesGoesToThoseThatLostMost) {
  EXPECT_THAT(sizes_by_shares(256, {2, 1}), ElementsAre(171, 85));
  EXPECT_THAT(sizes_by_shares(10, {1, 1, 1}), ElementsAre(4, 3, 3));
  EXPECT_THAT(sizes_by_shares(10, {0.26, 0.35, 0.39}), ElementsAre(3, 3, 4));  // 2.6, 3.5, 3.9
  EXPECT_THAT(sizes_by_shares(7, {1, 0, 1}), ElementsAre(4, 0, 3));
  EXPECT_THAT(sizes_by_shares(1, {1, 5, 1}), ElementsAre(0, 1, 0));
  EXPECT_THAT(sizes_by_shares(0, {1, 2}), ElementsAre(0, 0));
}

TEST(Shares, EqualOnesGiveNearEqualParts) {
  for (int count = 1; count <= 9; ++count) {
    for (int64_t total = 0; total <= 40; ++total) {
      const auto sizes = sizes_by_shares(total, Shares(static_cast<size_t>(count), 0.1 * count));
      for (int index = 0; index < count; ++index) EXPECT_EQ(sizes[index], part_of(total, index, count).size());
    }
  }
}

TEST(Shares, AddUpExactlyAndDifferFromTheirQuotasByLessThanOne) {
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> uniform(0, 1);
  for (int run = 0; run < 2000; ++run) {
    Shares shares(1 + random() % 12);
    for (auto& share : shares) share = random() % 5 == 0 ? 0 : std::pow(uniform(random), 4);
    if (std::accumulate(shares.begin(), shares.end(), 0.0) == 0) shares[0] = 1;
    const int64_t total = static_cast<int64_t>(random() % (run % 2 == 0 ? 20 : int64_t{1} << 40));
    const double sum = std::accumulate(shares.begin(), shares.end(), 0.0);
    const auto sizes = sizes_by_shares(total, shares);
    for (size_t i = 0; i < shares.size(); ++i) {
      const double quota = static_cast<double>(total) * (shares[i] / sum);
      EXPECT_LT(std::abs(static_cast<double>(sizes[i]) - quota), 1.001);
      if (shares[i] == 0) EXPECT_EQ(sizes[i], 0);
    }
    EXPECT_EQ(std::accumulate(sizes.begin(), sizes.end(), int64_t{0}), total);
    EXPECT_EQ(sizes_by_shares(total, shares), sizes);
  }
}

TEST(Shares, MayBeVeryLargeAndVerySmall) {
  EXPECT_THAT(sizes_by_shares(10, {1e308, 1e308, 1e-308}), ElementsAre(5, 5, 0));
  EXPECT_THAT(sizes_by_shares(10, {1e-320, 1e-320}), ElementsAre(5, 5));
}

TEST(Shares, RefusesWhatSharesNothingOut) {
  EXPECT_THAT(error_of([] { sizes_by_shares(10, {1, -1}); }), Refused());
  EXPECT_THAT(error_of([] { sizes_by_shares(10, {std::nan("")}); }), Refused());
  EXPECT_THAT(error_of([] { sizes_by_shares(10, {1, std::numeric_limits<double>::infinity()}); }), Refused());
  EXPECT_THAT(error_of([] { sizes_by_shares(10, {0, 0}); }), Refused());
  EXPECT_THAT(error_of([] { sizes_by_shares(10, {}); }), Refused());
  EXPECT_THAT(error_of([] { sizes_by_shares(-1, {1}); }), Refused());
}

const Dataset numbers = {torch::arange(20), torch::arange(20)};

// Tests what the parts of each batch add up to, and how large they are.
TEST(BatchesByShares, CutTheSameBatchesInOtherParts) {
  const BatchOptions whole{.size = 8, .seed = 3, .epoch = 2};
  BatchOptions by_shares = whole;
  by_shares.shares = {5, 0, 3};
  std::vector<Batches> parts;
  for (int partner = 0; partner < 3; ++partner) parts.push_back(batches(numbers, by_shares, {partner, 3, c10::kCPU}));
  std::vector<Batches::Iterator> its;
  for (auto& part : parts) its.push_back(part.begin());
  int count = 0;
  for (auto& batch : batches(numbers, whole)) {
    EXPECT_TRUE(torch::cat({its[0]->x, its[1]->x, its[2]->x}).equal(batch.x));
    EXPECT_TRUE(torch::cat({its[0]->y, its[1]->y, its[2]->y}).equal(batch.y));
    EXPECT_EQ(its[0]->size(), batch.size() == 8 ? 5 : 3);  // the last one: 4 samples, quotas 2.5 and 1.5
    EXPECT_EQ(its[1]->size(), 0);
    for (auto& it : its) EXPECT_EQ(it->global_size, batch.size());
    for (auto& it : its) ++it;
    ++count;
  }
  EXPECT_EQ(count, 3);
}

TEST(BatchesByShares, TakeOtherSharesFromTheNextBatchOn) {
  Batches all = batches(numbers, {.size = 5, .shuffle = false}, {1, 2, c10::kCPU});
  std::vector<std::vector<int64_t>> seen;
  for (auto& batch : all) {
    seen.emplace_back(batch.x.data_ptr<int64_t>(), batch.x.data_ptr<int64_t>() + batch.size());
    if (seen.size() == 1) all.set_shares({4, 1});
    if (seen.size() == 2) all.set_shares({0, 1});
    if (seen.size() == 3) all.set_shares({});
  }
  EXPECT_THAT(seen,
              ElementsAre(ElementsAre(3, 4), ElementsAre(9), ElementsAre(10, 11, 12, 13, 14), ElementsAre(18, 19)));
}

TEST(BatchesByShares, NeedOneShareForEachShard) {
  EXPECT_THAT(error_of([] { batches(numbers, {.shares = {1, 2, 3}}, {0, 2, c10::kCPU}); }), Refused());
  Batches all = batches(numbers, {}, {0, 2, c10::kCPU});
  EXPECT_THAT(error_of([&] { all.set_shares({1, -2}); }), Refused());
  EXPECT_EQ(all.begin()->size(), 10);
}

}  // namespace parts_test
}  // namespace lockstep
