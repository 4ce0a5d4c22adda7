// Labels: concurrency
// Samples of more than x and y, in orders of their own, read ahead, and from the middle of an epoch on.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <lockstep/data/data.hpp>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "data/data_digests.hpp"
#include "support/error_of.hpp"

namespace lockstep {
namespace samples_test {

using testing::ElementsAre;

constexpr int64_t kCount = 23;

// x, y and the masks of a sample all tell its number.
Dataset numbered_with_more() {
  const at::Tensor numbers = at::arange(kCount);
  return {numbers.to(at::kDouble).unsqueeze(1),
          numbers,
          {{"mask", (numbers % 2 == 0).unsqueeze(1).expand({-1, 3}).contiguous()}, {"token", numbers.to(at::kByte)}}};
}

Samples reading(const Dataset& all) {
  return {all.size(), [all](const std::vector<int64_t>& numbers) {
            const at::Tensor rows = at::tensor(numbers);
            const auto row_of = [&](const std::string& name) { return all.more.at(name).index_select(0, rows); };
            return Dataset{all.x.index_select(0, rows),
                           all.y.index_select(0, rows),
                           {{"mask", row_of("mask")}, {"token", row_of("token")}}};
          }};
}

std::vector<int64_t> numbers_in(const at::Tensor& y) {
  return {y.const_data_ptr<int64_t>(), y.const_data_ptr<int64_t>() + y.numel()};
}

void expect_consistent(const Batch& batch) {
  EXPECT_TRUE(at::equal(batch.x.squeeze(1).to(at::kLong), batch.y));
  EXPECT_EQ(batch["token"].scalar_type(), at::kByte);
  EXPECT_TRUE(at::equal(batch["token"].to(at::kLong), batch.y));
  EXPECT_EQ(batch["mask"].scalar_type(), at::kBool);
  EXPECT_TRUE(at::equal(batch["mask"].select(1, 2), batch.y % 2 == 0));
}

// The targets of all batches, in order.
std::vector<int64_t> order_of(const Samples& samples, const BatchOptions& options,
                              const Batches::Partner& partner = {}) {
  std::vector<int64_t> order;
  for (const Batch& batch : batches(samples, options, partner)) {
    const auto part = numbers_in(batch.y);
    order.insert(order.end(), part.begin(), part.end());
  }
  return order;
}

TEST(SamplesOfMore, KeepTheirRowsTogetherAndTheirTypes) {
  const Dataset all = numbered_with_more();
  for (const Samples& samples : {Samples(all), reading(all), reading(all).read_ahead(2)}) {
    for (const int64_t grain : {0, 2}) {
      for (int index = 0; index < 3; ++index) {
        int64_t seen = 0;
        for (const Batch& batch :
             batches(samples, {.size = 7, .seed = 3, .grain = grain}, {.index = index, .count = 3})) {
          expect_consistent(batch);
          for (const auto& part : batch.in_parts(2)) expect_consistent(part);
          if (grain > 0 && batch.size() > 0) expect_consistent(batch.of_grain(batch.own_grains().begin));
          seen += batch.size();
        }
        EXPECT_GT(seen, 0);
      }
    }
  }
}

TEST(SamplesOfMore, AreRefusedIfTheyDoNotFit) {
  Dataset all = numbered_with_more();
  const Batch batch = *batches(all, {.size = 4}).begin();
  EXPECT_THAT(error_of([&] { batch["weight"]; }), Refused());
  all.more["mask"] = all.more["mask"].slice(0, 1);
  EXPECT_THAT(error_of([&] { batches(all, {.size = 4}); }), Refused());
  const Samples short_of_masks(kCount, [](const std::vector<int64_t>& numbers) {
    const at::Tensor rows = at::tensor(numbers);
    return Dataset{rows, rows, {{"mask", at::zeros({2, 3})}}};
  });
  EXPECT_THAT(error_of([&] { batches(short_of_masks, {.size = 4}).begin(); }), Refused());
}

TEST(SamplesOfMore, HaveDigestsOfTheirOwn) {
  const auto of = [](const Samples& samples) { return digests_of(samples, {}).train_labels; };
  const Dataset all = numbered_with_more();
  Dataset other = all, without = all;
  other.more["mask"] = other.more["mask"].logical_not();
  without.more.clear();
  EXPECT_EQ(of(all), of(numbered_with_more()));
  EXPECT_NE(of(all), of(other));
  EXPECT_NE(of(all), of(without));
  const at::Tensor weights = at::ones({kCount}), others = at::arange(kCount);
  EXPECT_NE(of(all), of(Samples(all).with_weights(weights)));
  EXPECT_EQ(of(Samples(all).with_weights(weights)), of(Samples(all).with_weights(weights)));
  EXPECT_NE(of(Samples(all).with_weights(others)), of(Samples(all).with_weights(weights)));
}

// ---- Where an epoch begins.

TEST(BatchesFromTheMiddle, DoNotReadThoseBefore) {
  const Dataset all = numbered_with_more();
  std::atomic<int> reads = 0;
  const Samples counted(kCount, [&](const std::vector<int64_t>& numbers) {
    ++reads;
    const at::Tensor rows = at::tensor(numbers);
    return Dataset{all.x.index_select(0, rows), all.y.index_select(0, rows)};
  });
  const auto expected = order_of(all, {.size = 5, .seed = 2, .epoch = 4});
  for (const Samples& samples : {Samples(all), counted}) {
    reads = 0;
    const auto rest = order_of(samples, {.size = 5, .seed = 2, .epoch = 4, .start = 3});
    EXPECT_EQ(rest, std::vector<int64_t>(expected.begin() + 15, expected.end()));
    EXPECT_EQ(reads, samples.in_memory() ? 0 : 2);
    EXPECT_EQ(order_of(samples, {.size = 5, .start = 5}), std::vector<int64_t>());
  }
  const Batches late = batches(all, {.size = 5, .start = 4});
  EXPECT_EQ(late.count(), 5);
  EXPECT_EQ(late.begin()->mark, (*std::next(batches(all, {.size = 5}).begin(), 4)).mark);
  for (const int64_t start : {-1, 6})
    EXPECT_THAT(error_of([&] { batches(all, {.size = 5, .start = start}); }), Refused());
}

// ---- Orders of their own.

TEST(Weights, DrawEachSampleAsOftenAsTheySay) {
  const at::Tensor weights = at::tensor({0.0, 1.0, 2.0, 5.0});
  const Samples samples = Samples(Dataset{at::arange(4), at::arange(4)}).with_weights(weights);
  std::vector<int> times(4, 0);
  for (int epoch = 0; epoch < 4000; ++epoch) {
    for (const int64_t number : numbers_in(samples.order(7, epoch))) ++times[static_cast<size_t>(number)];
  }
  EXPECT_EQ(times[0], 0);
  for (size_t i = 1; i < 4; ++i) {
    const double share = weights[static_cast<int64_t>(i)].item<double>() / 8, expected = 16000 * share;
    EXPECT_NEAR(times[i], expected, 4 * std::sqrt(expected * (1 - share))) << i;
  }
}

TEST(Weights, GiveTheSameOrderOnAnyNumberOfRanks) {
  const Samples samples = Samples(numbered_with_more()).with_weights(at::arange(kCount));
  const BatchOptions options{.size = 6, .seed = 5, .epoch = 1};
  const auto whole = order_of(samples, options);
  EXPECT_NE(whole, order_of(samples, {.size = 6, .seed = 5, .epoch = 2}));
  EXPECT_EQ(whole, order_of(reading(numbered_with_more()).with_weights(at::arange(kCount)), options));
  for (const int count : {2, 3}) {
    std::vector<std::vector<int64_t>> of_batches(4);
    for (int index = 0; index < count; ++index) {
      size_t number = 0;
      for (const Batch& batch : batches(samples, options, {.index = index, .count = count})) {
        const auto part = numbers_in(batch.y);
        auto& all = of_batches[number++];
        all.insert(all.end(), part.begin(), part.end());
      }
    }
    std::vector<int64_t> joined;
    for (const auto& batch : of_batches) joined.insert(joined.end(), batch.begin(), batch.end());
    EXPECT_EQ(joined, whole);
  }
  // Evaluations take every sample once.
  EXPECT_EQ(order_of(samples, {.size = 6, .shuffle = false}), numbers_in(at::arange(kCount)));
}

TEST(Weights, ThatDifferBetweenRanksAreToldByTheMark) {
  const auto mark = [](const Samples& samples) { return batches(samples, {.size = 6, .seed = 5}).begin()->mark; };
  const Samples samples = numbered_with_more();
  EXPECT_EQ(mark(samples.with_weights(at::arange(kCount))), mark(samples.with_weights(at::arange(kCount))));
  EXPECT_NE(mark(samples.with_weights(at::arange(kCount))), mark(samples.with_weights(at::ones({kCount}))));
  EXPECT_NE(mark(samples), mark(samples.with_weights(at::ones({kCount}))));
  const auto read = reading(numbered_with_more());
  EXPECT_EQ(mark(samples), mark(read));
  const auto of_version = [](const std::string& version) {
    return Samples(
        2,
        [](const auto&) {
          return Dataset{at::zeros({2}), at::zeros({2})};
        },
        version);
  };
  EXPECT_NE(mark(of_version("a")), mark(of_version("b")));
}

TEST(Weights, AreRefusedIfNobodyCanDrawByThem) {
  const Samples samples = numbered_with_more();
  const auto refused = [&](const at::Tensor& weights) { return error_of([&] { samples.with_weights(weights); }); };
  EXPECT_THAT(refused(at::ones({22})), Refused());
  EXPECT_THAT(refused(at::zeros({kCount})), Refused());
  EXPECT_THAT(refused(at::arange(kCount) - 1), Refused());
  EXPECT_THAT(refused(at::full({kCount}, NAN)), Refused());
}

TEST(Orders, OfTheUsersOwnAreTakenAndChecked) {
  const Samples samples = numbered_with_more();
  const auto backwards = [](uint64_t, int64_t epoch) { return (at::arange(kCount).flip(0) + epoch) % kCount; };
  const auto order = order_of(samples.with_order(backwards), {.size = 4, .epoch = 1});
  EXPECT_EQ(order, numbers_in(backwards(0, 1)));
  const auto refused = [&](const at::Tensor& gives) {
    return error_of(
        [&] { batches(samples.with_order([gives](auto, auto) { return gives; }), {.size = 4, .epoch = 3}); });
  };
  EXPECT_THAT(refused(at::arange(22)), Refused());
  EXPECT_THAT(refused(at::arange(kCount) + 1), Refused());
  EXPECT_THAT(refused(at::zeros({kCount})), Refused());
  EXPECT_THAT(error_of([&] { samples.with_order(nullptr); }), Refused());
}

// ---- By grains.

// LibTorch's sigmoid of many values has other last bits than of few.
TEST(Grains, AreReadByThemselves) {
  const at::Tensor values = at::linspace(-3, 3, 23 * 5).view({23, 5});
  std::atomic<int> uneven = 0;
  const Samples samples(23, [&](const std::vector<int64_t>& numbers) {
    const at::Tensor rows = at::tensor(numbers);
    uneven += numbers.size() != 3 && numbers.size() != 1 && numbers.size() != 2;
    return Dataset{values.index_select(0, rows).sigmoid(), rows, {{"row", rows}}};
  });
  for (const Samples& some : {samples, samples.read_ahead(2)}) {
    std::vector<at::Tensor> expected(23);
    for (const int count : {1, 2, 3, 5}) {
      for (int index = 0; index < count; ++index) {
        for (const Batch& batch : batches(some, {.size = 10, .grain = 3}, {.index = index, .count = count})) {
          for (int64_t row = 0; row < batch.size(); ++row) {
            auto& theirs = expected[static_cast<size_t>(batch.y[row].item<int64_t>())];
            if (!theirs.defined()) theirs = batch.x[row].clone();
            EXPECT_TRUE(at::equal(batch.x[row], theirs)) << row << " of " << index << " of " << count;
          }
          EXPECT_TRUE(at::equal(batch["row"], batch.y));
        }
      }
    }
  }
  EXPECT_EQ(uneven, 0);
}

TEST(Grains, OfUnequalShapesAreRefused) {
  const auto refused = [](int64_t grain, const Samples::Read& read) {
    return error_of([&] { batches(Samples(8, read), {.size = 8, .shuffle = false, .grain = grain}).begin(); });
  };
  const auto padded = [](const std::vector<int64_t>& numbers) {  // to the longest of these
    const auto count = static_cast<int64_t>(numbers.size());
    return Dataset{at::zeros({count, numbers.back()}), at::zeros({count})};
  };
  EXPECT_EQ(refused(0, padded), "(no error)");
  EXPECT_THAT(refused(4, padded), Refused());
  const auto with_some = [](const std::vector<int64_t>& numbers) {
    Dataset all{at::tensor(numbers), at::tensor(numbers)};
    if (numbers[0] == 0) all.more["mask"] = all.y;
    return all;
  };
  EXPECT_THAT(refused(4, with_some), Refused());
  const auto with_later = [](const std::vector<int64_t>& numbers) {
    Dataset all{at::tensor(numbers), at::tensor(numbers)};
    if (numbers[0] != 0) all.more["mask"] = all.y;
    return all;
  };
  EXPECT_THAT(refused(4, with_later), Refused());
}

// Kernels may take another way through memory in another order.
TEST(Grains, LieTheSameWhetherARankHasOneOrSeveral) {
  const Samples transposed(8, [](const std::vector<int64_t>& numbers) {
    const auto count = static_cast<int64_t>(numbers.size());
    return Dataset{at::zeros({count, 3, 5}).transpose(1, 2), at::zeros({count})};
  });
  EXPECT_EQ(transposed.read({0, 1}, 2).x.strides(), transposed.read({0, 1, 2, 3}, 2).x.strides());
}

// ---- Reading ahead.

TEST(ReadAhead, GivesTheSameBatchesOnAThreadOfItsOwn) {
  const Dataset all = numbered_with_more();
  const auto here = std::this_thread::get_id();
  std::atomic<bool> elsewhere = true;
  const Samples plain = reading(all);
  const Samples ahead = Samples(kCount, [&](const std::vector<int64_t>& numbers) {
                          if (std::this_thread::get_id() == here) elsewhere = false;
                          return plain.read(numbers);
                        }).read_ahead(3);
  for (const int64_t start : {0, 2}) {
    const BatchOptions options{.size = 4, .seed = 1, .start = start};
    EXPECT_EQ(order_of(ahead, options), order_of(plain, options));
  }
  EXPECT_TRUE(elsewhere);
  // Other shares from the third batch on: what was read for the old ones is not taken.
  std::vector<int64_t> with_shares[2];
  for (const bool is_ahead : {false, true}) {
    Batches some = batches(is_ahead ? ahead : plain, {.size = 4, .seed = 1}, {.index = 1, .count = 2});
    int taken = 0;
    for (auto& batch : some) {
      const auto part = numbers_in(batch.y);
      with_shares[is_ahead].insert(with_shares[is_ahead].end(), part.begin(), part.end());
      if (++taken == 2) some.set_shares({1, 3});
    }
  }
  EXPECT_EQ(with_shares[0], with_shares[1]);
}

TEST(ReadAhead, IsBoundedAndEndsWithTheLoop) {
  std::atomic<int> reads = 0;
  const Samples samples = Samples(1000, [&](const std::vector<int64_t>& numbers) {
                            ++reads;
                            const at::Tensor rows = at::tensor(numbers);
                            return Dataset{rows, rows};
                          }).read_ahead(2);
  for (const Batch& batch : batches(samples, {.size = 10})) {
    EXPECT_EQ(batch.size(), 10);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (reads < 3 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    break;  // the thread ends here, though there is more to read
  }
  EXPECT_EQ(reads, 3);  // the batch and two ahead
  EXPECT_THAT(error_of([&] { samples.read_ahead(-1); }), Refused());
}

TEST(ReadAhead, ThrowsWhereTheBatchIsTaken) {
  const Samples samples = Samples(20, [](const std::vector<int64_t>& numbers) {
                            const at::Tensor rows = at::tensor(numbers);
                            if (numbers[0] >= 10) throw Error("sample " + std::to_string(numbers[0]) + " is damaged");
                            return Dataset{rows, rows};
                          }).read_ahead(4);
  int taken = 0;
  EXPECT_EQ(any_error_of([&] {
              for (const Batch& batch : batches(samples, {.size = 5, .shuffle = false})) taken += batch.size() > 0;
            }),
            "sample 10 is damaged");
  EXPECT_EQ(taken, 2);
}

}  // namespace samples_test
}  // namespace lockstep
