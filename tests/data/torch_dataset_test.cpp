// Labels: concurrency
// Datasets of LibTorch's torch::data as Samples: their transforms and collates, in lockstep's order, on several
// threads.
#include <gmock/gmock.h>
#include <torch/data.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data/torch_dataset.hpp>

#include <atomic>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "support/error_of.hpp"

namespace torch_dataset_test {

using namespace lockstep;
using torch::Tensor;
namespace td = torch::data;

constexpr int64_t kCount = 17;

// Sample i has the data {i, i} and the target 3 * i. A copy that two threads use at the same time is noticed.
struct Numbers : td::datasets::Dataset<Numbers> {
  static inline std::atomic<int> copies = 0, clashes = 0;

  Numbers() = default;
  Numbers(const Numbers& other) : Dataset(other) { ++copies; }
  Numbers& operator=(const Numbers&) = default;

  td::Example<> get(size_t index) override {
    if (std::exchange(busy, true)) ++clashes;
    std::this_thread::yield();
    const auto number = static_cast<int64_t>(index);
    td::Example<> example{torch::full({2}, static_cast<double>(number), torch::kDouble), torch::tensor(3 * number)};
    busy = false;
    return example;
  }
  torch::optional<size_t> size() const override { return kCount; }

  bool busy = false;
};

void expect_as_in_memory(const Samples& samples, double scale) {
  const Tensor numbers = torch::arange(kCount);
  const lockstep::Dataset all{numbers.to(torch::kDouble).unsqueeze(1).expand({-1, 2}) * scale, 3 * numbers};
  const BatchOptions options{.size = 5, .seed = 4, .epoch = 2};
  for (int index = 0; index < 2; ++index) {
    Batches expected = batches(all, options, {.index = index, .count = 2});
    auto wanted = expected.begin();
    for (const Batch& batch : batches(samples, options, {.index = index, .count = 2})) {
      EXPECT_TRUE(torch::equal(batch.x, wanted->x));
      EXPECT_TRUE(torch::equal(batch.y, wanted->y));
      EXPECT_GT(batch.mark, 0);  // the mark of samples in memory tells some of them too
      ++wanted;
    }
    EXPECT_TRUE(wanted == expected.end());
  }
}

TEST(TorchDatasets, GiveTheSamplesInLockstepsOrder) {
  expect_as_in_memory(samples_of(Numbers()), 1);
  const auto halve = td::transforms::TensorLambda<>([](const Tensor& data) { return data / 2; });
  expect_as_in_memory(samples_of(Numbers().map(halve)), 0.5);  // a list of Examples
  expect_as_in_memory(samples_of(Numbers().map(halve).map(td::transforms::Stack<>())).read_ahead(2),
                      0.5);  // a stacked one
}

TEST(TorchDatasets, TakeACollateOfTheUsersOwn) {
  const auto collate = [](const std::vector<td::Example<>>& examples) {
    std::vector<Tensor> data, targets;
    for (const auto& example : examples) {
      data.push_back(example.data);
      targets.push_back(example.target);
    }
    const Tensor y = torch::stack(targets);
    return lockstep::Dataset{torch::stack(data), y, {{"even", y % 2 == 0}}};
  };
  for (const Batch& batch : batches(samples_of(Numbers(), collate, "numbers"), {.size = 5}))
    EXPECT_TRUE(torch::equal(batch["even"], batch.y % 2 == 0));
  EXPECT_EQ(samples_of(Numbers(), "numbers").version(), "numbers");
}

TEST(TorchDatasets, AreCopiedForThreadsThatReadAtTheSameTime) {
  const Samples samples = samples_of(Numbers());
  Numbers::copies = Numbers::clashes = 0;
  std::vector<std::thread> threads;
  for (int index = 0; index < 3; ++index) {
    threads.emplace_back([&samples, index] {
      for (int epoch = 0; epoch < 20; ++epoch) {
        for (const Batch& batch : batches(samples, {.size = 5, .epoch = epoch}, {.index = index, .count = 3}))
          EXPECT_TRUE(torch::equal(batch.x.select(1, 0).to(torch::kLong) * 3, batch.y));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(Numbers::clashes, 0);
  EXPECT_LE(Numbers::copies, 3);
}

struct Unending : Numbers {
  torch::optional<size_t> size() const override { return {}; }
};

TEST(TorchDatasets, WithoutASizeAreRefused) {
  EXPECT_THAT(error_of([] { samples_of(Unending()); }), Refused());
}

}  // namespace torch_dataset_test
