// Batches: which samples come in which batch of which rank, in which order and as what; and when they are refused.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <lockstep/data/data.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "data/data_digests.hpp"
#include "support/error_of.hpp"

namespace lockstep {
namespace batches_test {

using testing::ElementsAre;

// Sample i is [i, -i], its target i + 1000.
Dataset numbered(int64_t n) {
  at::Tensor numbers = at::arange(n, at::kLong);
  return {at::stack({numbers, -numbers}, 1), numbers + 1000};
}

// The numbers of the samples that one partner gets, batch by batch.
std::vector<std::vector<int64_t>> numbers_of(const Dataset& dataset, const BatchOptions& options,
                                             const Batches::Partner& partner) {
  std::vector<std::vector<int64_t>> result;
  for (const Batch& batch : batches(dataset, options, partner)) {
    at::Tensor numbers = batch.y - 1000;
    EXPECT_TRUE(at::equal(batch.x, at::stack({numbers, -numbers}, 1)));
    EXPECT_EQ(batch.size(), numbers.numel());
    result.emplace_back(numbers.data_ptr<int64_t>(), numbers.data_ptr<int64_t>() + numbers.numel());
  }
  return result;
}

TEST(Batches, OfAllShardsTogetherAreTheWholePermutationOnce) {
  std::mt19937 random(1);
  bool had_empty_part = false;
  for (int trial = 0; trial < 200; ++trial) {
    Dataset dataset = numbered(random() % 60);
    BatchOptions options{.size = 1 + trial % 20, .seed = random(), .epoch = trial % 5, .shuffle = trial % 4 != 0};
    auto whole = numbers_of(dataset, options, {});
    int count = 1 + static_cast<int>(random() % 5);
    SCOPED_TRACE(testing::Message() << dataset.size() << " samples, batches of " << options.size << ", " << count
                                    << " partners");

    std::vector<std::vector<int64_t>> joined(whole.size());
    for (int index = 0; index < count; ++index) {
      auto parts = numbers_of(dataset, options, {.index = index, .count = count});
      ASSERT_EQ(parts.size(), whole.size());
      for (size_t batch = 0; batch < parts.size(); ++batch) {
        size_t least = whole[batch].size() / count;
        EXPECT_GE(parts[batch].size(), least);
        EXPECT_LE(parts[batch].size(), least + 1);
        had_empty_part |= parts[batch].empty();
        joined[batch].insert(joined[batch].end(), parts[batch].begin(), parts[batch].end());
      }
    }
    EXPECT_EQ(joined, whole);  // the same batches in the same order, whatever the number of partners

    std::vector<int64_t> seen;
    for (size_t batch = 0; batch < whole.size(); ++batch) {
      bool last = batch + 1 == whole.size();
      if (!last) EXPECT_EQ(whole[batch].size(), static_cast<size_t>(options.size));
      if (last) EXPECT_GE(whole[batch].size(), 1u);
      seen.insert(seen.end(), whole[batch].begin(), whole[batch].end());
    }
    if (options.shuffle) std::sort(seen.begin(), seen.end());
    std::vector<int64_t> all(dataset.size());
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(seen, all);
  }
  EXPECT_TRUE(had_empty_part);
}

TEST(Batches, HaveAnOrderThatSeedAndEpochAloneDecide) {
  Dataset dataset = numbered(100);
  auto order = [&](uint64_t seed, int64_t epoch, int64_t size = 100) {
    std::vector<int64_t> result;
    for (const auto& batch : numbers_of(dataset, {.size = size, .seed = seed, .epoch = epoch}, {})) {
      result.insert(result.end(), batch.begin(), batch.end());
    }
    return result;
  };
  auto first = order(3, 5);
  at::manual_seed(99);
  at::rand({10});
  EXPECT_EQ(order(3, 5), first);
  EXPECT_EQ(order(3, 5, 7), first);

  // Every pair gives an order of its own, pairs with the same sum or with equal low bits too.
  std::set<std::vector<int64_t>> orders;
  for (uint64_t seed : {uint64_t{0}, uint64_t{1}, uint64_t{2}, uint64_t{3}, uint64_t{1} << 32, uint64_t{1} << 63}) {
    for (int64_t epoch = 0; epoch < 10; ++epoch) orders.insert(order(seed, epoch));
  }
  EXPECT_EQ(orders.size(), 60u);
}

TEST(Batches, LeaveTheGlobalGeneratorAlone) {
  at::manual_seed(5);
  at::Tensor expected = at::rand({4});
  at::manual_seed(5);
  batches(numbered(50), {});
  EXPECT_TRUE(at::equal(at::rand({4}), expected));
}

TEST(Batches, ShuffleWell) {
  auto order = numbers_of(numbered(1000), {.size = 1000}, {}).at(0);
  int fixed = 0, neighbours = 0;
  for (size_t i = 0; i < order.size(); ++i) fixed += order[i] == static_cast<int64_t>(i);
  for (size_t i = 1; i < order.size(); ++i) neighbours += order[i] == order[i - 1] + 1;
  EXPECT_LT(fixed, 10);
  EXPECT_LT(neighbours, 10);
}

TEST(Batches, WithoutShufflingKeepTheOrder) {
  EXPECT_THAT(numbers_of(numbered(7), {.size = 3, .shuffle = false}, {.index = 0, .count = 2}),
              ElementsAre(ElementsAre(0, 1), ElementsAre(3, 4), ElementsAre(6)));
  EXPECT_THAT(numbers_of(numbered(7), {.size = 3, .shuffle = false}, {.index = 1, .count = 2}),
              ElementsAre(ElementsAre(2), ElementsAre(5), ElementsAre()));
}

TEST(Batches, MakeFloatsOfImages) {
  Dataset dataset{at::tensor({0, 51, 255}, at::kByte).view({3, 1, 1, 1}), at::zeros({3}, at::kLong)};
  for (const Batch& batch : batches(dataset, {.shuffle = false})) {
    EXPECT_EQ(batch.x.scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(batch.x.flatten(), at::tensor({0.0f, 0.2f, 1.0f})));
    EXPECT_EQ(batch.global_size, 3);
  }
  EXPECT_TRUE(at::equal(dataset.x.flatten(), at::tensor({0, 51, 255}, at::kByte)));
}

TEST(Batches, LeaveOtherTypesAsTheyAre) {
  for (auto type : {at::kDouble, at::kFloat, at::kHalf, at::kLong}) {
    Dataset dataset{at::ones({4, 2}, type), at::ones({4}, at::kFloat)};
    EXPECT_EQ(batches(dataset, {}).begin()->x.scalar_type(), type);
  }
}

TEST(Batches, GiveAnEmptyPartItsShapeAndType) {
  Dataset dataset{at::zeros({2, 1, 28, 28}, at::kByte), at::zeros({2}, at::kLong)};
  for (bool shuffle : {true, false}) {
    Batches part = batches(dataset, {.shuffle = shuffle}, {.index = 2, .count = 3});
    const Batch batch = *part.begin();
    EXPECT_EQ(batch.x.sizes(), (std::vector<int64_t>{0, 1, 28, 28}));
    EXPECT_EQ(batch.x.scalar_type(), at::kFloat);
    EXPECT_EQ(batch.y.sizes(), (std::vector<int64_t>{0}));
    EXPECT_EQ(batch.size(), 0);
    EXPECT_EQ(batch.global_size, 2);
  }
}

// They would train all the same, divided by 255.
TEST(Batches, RefuseTablesAndTokensOfBytes) {
  for (const auto& shape : std::vector<std::vector<int64_t>>{{6}, {6, 4}}) {
    const Dataset bytes{at::ones(shape, at::kByte), at::zeros({6}, at::kLong)};
    EXPECT_THAT(error_of([&] { batches(bytes, {.size = 2}); }), Refused());
  }
  const Dataset images{at::ones({6, 4, 4}, at::kByte), at::zeros({6}, at::kLong)};
  EXPECT_EQ(batches(images, {.size = 2}).count(), 3);
}

// There are three grains, and four partners.
TEST(Batches, GiveAnEmptyPartASampleAsAnExample) {
  Dataset dataset = numbered(6);
  dataset.x = dataset.x.to(at::kByte).unsqueeze(2);
  dataset.more["mask"] = dataset.x;
  const Samples read(6, [&](const std::vector<int64_t>& numbers) {
    const at::Tensor rows = at::tensor(numbers);
    return Dataset{dataset.x.index_select(0, rows), dataset.y.index_select(0, rows)};
  });
  for (const bool shuffle : {true, false}) {
    for (int index = 0; index < 4; ++index) {
      const BatchOptions options{.size = 6, .shuffle = shuffle, .grain = 2};
      const Batches::Partner partner{.index = index, .count = 4};
      const Batch batch = *batches(dataset, options, partner).begin(), other = *batches(read, options, partner).begin();
      EXPECT_EQ(batch.like.x.defined(), index == 3);
      EXPECT_EQ(other.like.x.defined(), index == 3);
      if (index < 3) continue;
      const int64_t number = batch.like.y.item<int64_t>() - 1000;
      EXPECT_TRUE(at::equal(batch.like.x, dataset.x.narrow(0, number, 1).to(at::kFloat).div(255)));
      EXPECT_TRUE(at::equal(batch.like.more.at("mask"), dataset.x.narrow(0, number, 1)));
      EXPECT_TRUE(at::equal(other.like.x, dataset.x.narrow(0, other.like.y.item<int64_t>() - 1000, 1)));
      EXPECT_FALSE(batches(dataset, {.size = 6}, {.index = 7, .count = 8}).begin()->like.x.defined());
    }
  }
}

// Partners have 2, 2 and 1 of 5 grains, the last of 2 samples.
TEST(Batches, WithAGrainAreCutIntoAsManyPartsOnAllShards) {
  const Dataset dataset = numbered(18);
  const auto parts_of = [&](int index, int64_t count) {
    const Batch batch =
        *batches(dataset, {.size = 18, .shuffle = false, .grain = 4}, {.index = index, .count = 3}).begin();
    return batch.in_parts(count);
  };
  for (int index = 0; index < 3; ++index) {
    const auto one = parts_of(index, 1), two = parts_of(index, 2);
    ASSERT_EQ(one.size(), 1u);
    EXPECT_EQ(one[0].turns, 2);
    ASSERT_EQ(two.size(), 2u);
    EXPECT_EQ(parts_of(index, 9).size(), 2u);
    EXPECT_EQ(two[0].turns + two[1].turns, 2);
    EXPECT_EQ(two[0].size() + two[1].size(), index == 2 ? 2 : 8);
    EXPECT_EQ(two[1].size(), index == 2 ? 0 : 4);
    EXPECT_EQ(two[1].first, index == 2 ? 18 : 8 * index + 4);
    EXPECT_EQ(two[1].like.x.defined(), index == 2);
    EXPECT_EQ(two[0].most_grains(), 1);
  }
}

template <class Source>
std::vector<Batch> all_batches(const Source& source, const BatchOptions& options, const Batches::Partner& partner) {
  std::vector<Batch> all;
  for (const Batch& batch : batches(source, options, partner)) all.push_back(batch);
  return all;
}

TEST(Batches, OfAFunctionAreThoseOfTheSameSamplesInMemory) {
  Dataset dataset = numbered(23);
  dataset.x = dataset.x.to(at::kByte).unsqueeze(2);  // bytes become floats where they lie in memory
  size_t most = 0;
  const Samples read(23, [&](const std::vector<int64_t>& numbers) {
    most = std::max(most, numbers.size());
    const at::Tensor rows = at::tensor(numbers);
    return Dataset{dataset.x.index_select(0, rows), dataset.y.index_select(0, rows)};
  });
  for (const bool shuffle : {true, false}) {
    for (const int64_t grain : {0, 2}) {
      for (int index = 0; index < 4; ++index) {  // the last batch has 2 samples
        const BatchOptions options{.size = 7, .seed = 3, .epoch = 1, .shuffle = shuffle, .grain = grain};
        const Batches::Partner partner{.index = index, .count = 4};
        const auto expected = all_batches(dataset, options, partner), found = all_batches(read, options, partner);
        ASSERT_EQ(found.size(), 4u);
        for (size_t i = 0; i < 4; ++i) {
          EXPECT_EQ(found[i].x.scalar_type(), at::kByte);
          EXPECT_TRUE(at::equal(found[i].x.to(at::kFloat).div(255), expected[i].x));
          EXPECT_TRUE(at::equal(found[i].y, expected[i].y));
          EXPECT_EQ(found[i].first, expected[i].first);
          EXPECT_EQ(found[i].global_size, expected[i].global_size);
          EXPECT_GT(found[i].mark, 0);  // the mark of samples in memory tells some of them too
          EXPECT_EQ(found[i].runs, expected[i].runs);
        }
      }
    }
  }
  EXPECT_EQ(most, 2u);  // a partner reads its own samples alone
}

TEST(Samples, RefuseWhatIsNone) {
  const auto none = [](const std::vector<int64_t>&) { return Dataset{at::zeros({2, 3}), at::zeros({1})}; };
  EXPECT_THAT(error_of([&] { Samples(-1, none); }), Refused());
  EXPECT_THAT(error_of([] { Samples(3, nullptr); }), Refused());
  EXPECT_THAT(error_of([&] { batches(Samples(3, none), {.size = 2}).begin(); }), Refused());
  EXPECT_THAT(error_of([] { batches(Samples(), {.size = 2}); }), Refused());
}

TEST(DataDigests, TellSamplesApart) {
  const auto of = [](const Samples& samples) { return digests_of(samples, {}); };
  const Dataset dataset = numbered(5);
  const DataDigests digests = of(dataset);
  EXPECT_EQ(of(numbered(5)), digests);
  EXPECT_FALSE(of(Dataset{dataset.x, dataset.y + 1}) == digests);
  EXPECT_FALSE(of(Dataset{dataset.x.to(at::kDouble), dataset.y}) == digests);
  EXPECT_FALSE(of(Dataset{dataset.x.flatten(), dataset.y}) == digests);
  const auto none = [](const std::vector<int64_t>&) { return Dataset(); };
  EXPECT_EQ(of(Samples(5, none, "a")), of(Samples(5, none, "a")));
  EXPECT_FALSE(of(Samples(5, none, "a")) == of(Samples(5, none, "b")));
  EXPECT_FALSE(of(Samples(5, none, "a")) == of(Samples(6, none, "a")));
}

TEST(Batches, CountThemselves) {
  EXPECT_EQ(batches(numbered(0), {.size = 4}).count(), 0);
  EXPECT_EQ(batches(numbered(8), {.size = 4}).count(), 2);
  EXPECT_EQ(batches(numbered(9), {.size = 4}).count(), 3);
  EXPECT_EQ(batches(numbered(9), {.size = std::numeric_limits<int64_t>::max()}).count(), 1);
}

TEST(Batches, LeaveOutALastOneThatIsSmaller) {
  for (const int64_t samples : {33, 32}) {
    Batches all = batches(numbered(samples), {.size = 8, .drop_last = true, .seed = 1, .epoch = 2});
    EXPECT_EQ(all.count(), 4);
    int64_t seen = 0;
    for (auto& batch : all) seen += batch.size();
    EXPECT_EQ(seen, 32);
  }
}

TEST(Batches, RefuseBadOptions) {
  auto error = [](const Dataset& dataset, const BatchOptions& options, const Batches::Partner& partner = {}) {
    return error_of([&] { batches(dataset, options, partner); });
  };
  EXPECT_THAT(error(numbered(4), {.size = 0}), Refused());
  EXPECT_THAT(error(numbered(4), {.size = -3}), Refused());
  EXPECT_THAT(error(numbered(4), {.size = 5, .drop_last = true}), Refused());
  EXPECT_THAT(error(numbered(4), {}, {.index = 2, .count = 2}), Refused());
  EXPECT_THAT(error(numbered(4), {}, {.index = -1, .count = 2}), Refused());
  EXPECT_THAT(error(numbered(4), {}, {.index = 0, .count = 0}), Refused());
  EXPECT_THAT(error({at::zeros({4, 2}), at::zeros({5})}, {}), Refused());
  EXPECT_THAT(error({at::zeros({4}), at::Tensor()}, {}), Refused());
  EXPECT_THAT(error({at::zeros({4}), at::zeros({4}, at::kMeta)}, {}), Refused());
}

// The meta device stands for another device: what is moved there has its shapes and types.
TEST(Batches, MoveToTheShardsDevice) {
  Dataset dataset{at::zeros({4, 1, 2, 2}, at::kByte), at::zeros({4}, at::kLong)};
  for (bool shuffle : {true, false}) {
    Batches parts = batches(dataset, {.size = 4, .shuffle = shuffle}, {.index = 1, .count = 2, .device = at::kMeta});
    EXPECT_EQ(parts.begin()->x.device(), at::kMeta);
    EXPECT_EQ(parts.begin()->y.device(), at::kMeta);
    EXPECT_EQ(parts.begin()->x.sizes(), (std::vector<int64_t>{2, 1, 2, 2}));
  }
}

// A batch that is a view of the data set: an operation in place would count again in each epoch.
TEST(Batches, RefuseAnOperationInPlaceThatChangesTheDataSet) {
  const auto error = [](const BatchOptions& options, const auto& change) {
    const Dataset dataset{at::ones({6, 2}), at::zeros({6}, at::kLong)};
    return error_of([&] {
      for (auto& batch : batches(dataset, options)) change(batch);
    });
  };
  const BatchOptions in_order{.size = 2, .shuffle = false}, all_at_once{.size = 6, .shuffle = false};
  const auto on_x = [](Batch& batch) { batch.x.div_(2); };
  const auto on_y = [](Batch& batch) { batch.y.add_(1); };
  const auto on_slice = [](Batch& batch) { batch.x.slice(1, 0, 1).zero_(); };
  for (const auto& options : {in_order, all_at_once}) {
    EXPECT_THAT(error(options, on_x), Refused());
    EXPECT_THAT(error(options, on_y), Refused());
    EXPECT_THAT(error(options, on_slice), Refused());
    EXPECT_EQ(error(options, [](Batch& batch) { batch.x = batch.x.div(2).add_(1); }), "(no error)");
    EXPECT_EQ(error(options, [](Batch& batch) { (batch.x = batch.x.clone()).div_(2); }), "(no error)");
  }
  EXPECT_EQ(error({.size = 2}, on_x), "(no error)");  // gathered rows
}

TEST(Batches, TheirFirstOneMayBeKept) {
  const Dataset dataset{at::ones({6, 2}), at::zeros({6}, at::kLong)};
  const auto& first = *batches(dataset, {.size = 4}).begin();
  EXPECT_EQ(first.size(), 4);
  EXPECT_EQ(first.global_size, 4);
}

TEST(Batches, LetTheDataSetChangeBetweenTwoIterations) {
  const Dataset dataset{at::ones({6, 2}), at::zeros({6}, at::kLong)};
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (auto& batch : batches(dataset, {.size = 2, .shuffle = false})) {
      if (epoch == 0 && batch.x[0][0].item<float>() > 0) break;
    }
    dataset.x.add_(1);
  }
}

}  // namespace batches_test
}  // namespace lockstep
