// Labels: concurrency
// Balance on ranks whose forward takes as long for a sample as their speed allows: parts, gradients, changes.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/lab/balance.hpp>

#include "support/group_tests.hpp"
#include "support/random_training.hpp"
#include "support/tensor_bits.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

namespace lockstep {
namespace balance_test {

namespace F = torch::nn::functional;

// A net whose forward takes time in proportion to its samples. `pass` lets seconds pass: it sleeps instead of
// computing, or moves a simulated clock.
struct SlowNet : torch::nn::Module {
  SlowNet() {
    torch::manual_seed(1);
    layers = register_module(
        "layers", torch::nn::Sequential(torch::nn::Linear(6, 5), torch::nn::Tanh(), torch::nn::Linear(5, 3)));
    to(torch::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    pass(fixed + per_sample * static_cast<double>(x.size(0)));
    return layers->forward(x);
  }
  torch::nn::Sequential layers{nullptr};
  std::function<void(double)> pass = [](double) {};
  double fixed = 0, per_sample = 0;
};

std::shared_ptr<SlowNet> new_net(Rank& rank) {
  return rank.in_turn([] { return std::make_shared<SlowNet>(); });
}

constexpr int64_t batch_size = 48;
constexpr int steps = 21;  // steps of an epoch; the last has half a batch

Dataset samples() {
  torch::manual_seed(2);
  const int64_t count = batch_size * (steps - 1) + batch_size / 2;
  return {torch::randn({count, 6}, torch::kDouble), torch::randint(3, {count})};
}

using Speed = std::function<double(int rank, int step)>;  // in seconds
using Parts = std::vector<std::vector<int64_t>>;          // parts of each step, by rank

// Trains two epochs on `ranks` ranks, and compares each step's gradients with those of one device.
Parts parts_of_training(int ranks, const Speed& per_sample, const Speed& fixed, bool simulated = true) {
  const Dataset data = samples();
  Parts parts(2 * steps, std::vector<int64_t>(static_cast<size_t>(ranks)));
  run(test_devices(ranks), [&](Rank& rank) {
    const auto one = new_net(rank);  // sees whole batches, at once
    DataParallel net(new_net(rank), rank);
    double now = 0;
    net->pass = [&](double seconds) {
      if (simulated) now += seconds;
      if (!simulated) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    };
    BalanceOptions options;
    if (simulated) options.clock = [&] { return now; };
    Balance balance(net, rank, options);
    torch::optim::SGD sgd(net->parameters(), 0.1), sgd_of_one(one->parameters(), 0.1);
    int step = 0;
    for (int epoch = 0; epoch < 2; ++epoch) {
      const BatchOptions whole{.size = batch_size, .epoch = epoch};
      BatchOptions in_parts = whole;
      in_parts.shares = balance.shares();
      const Batches all_of_one = batches(data, whole);
      Batches all = batches(data, in_parts, rank);
      auto its = all_of_one.begin();
      for (auto& batch : all) {
        sgd_of_one.zero_grad();
        F::cross_entropy(one->forward(its->x), its->y).backward();
        now += 100.0 * rank.index();  // time that is not training
        balance.leave_out();
        net->per_sample = per_sample(rank.index(), step);
        net->fixed = fixed(rank.index(), step);
        sgd.zero_grad();
        net.loss(batch, F::cross_entropy).backward();
        for (size_t i = 0; i < one->parameters().size(); ++i) {
          expect_near(net->parameters()[i].grad(), one->parameters()[i].grad(), 1e-12, "step " + std::to_string(step));
        }
        sgd.step();
        sgd_of_one.step();
        parts[static_cast<size_t>(step++)][static_cast<size_t>(rank.index())] = batch.size();
        balance.step(batch, all);
        ++its;
      }
    }
  });
  for (size_t step = 0; step < parts.size(); ++step) {
    const int64_t expected = step % steps == steps - 1 ? batch_size / 2 : batch_size;
    EXPECT_EQ(std::accumulate(parts[step].begin(), parts[step].end(), int64_t{0}), expected) << "step " << step;
  }
  return parts;
}

const Speed nothing = [](int, int) { return 0.0; };
const Speed half_as_fast = [](int rank, int) { return rank == 1 ? 1e-3 : 0.5e-3; };

TEST(Balance, ARankOfHalfTheSpeedGetsHalfAsMuch) {
  const auto parts = parts_of_training(2, half_as_fast, nothing);
  for (size_t step = 0; step < parts.size(); ++step) {
    const bool whole = step % steps != steps - 1;
    EXPECT_EQ(parts[step][0], step < 10 ? 24 : whole ? 32 : 16) << "step " << step;  // also in the next epoch
  }
}

// A machine with other work to do wakes sleepers late, on both ranks alike: what they sleep is then not all there is.
TEST(Balance, MeasuresByTheClockOnTheWall) {
  const auto parts = parts_of_training(2, half_as_fast, nothing, /*simulated=*/false);
  double mean = 0;
  for (size_t step = 21; step < 41; ++step) mean += static_cast<double>(parts[step][0]) / 20;
  EXPECT_GT(mean, 25);  // equal parts: 24
  EXPECT_LT(mean, 37);
}

TEST(Balance, FollowsARankThatBecomesSlower) {
  const Speed speed = [](int rank, int step) { return rank == (step < 12 ? 1 : 0) ? 1.2e-3 : 0.4e-3; };
  const auto parts = parts_of_training(3, speed, nothing);
  EXPECT_EQ(parts[11][1], 7);
  EXPECT_NEAR(static_cast<double>(parts[11][0]), 20.5, 1);
  EXPECT_NEAR(static_cast<double>(parts[40][0]), 7, 1);
  EXPECT_NEAR(static_cast<double>(parts[40][1]), 20.5, 1);
}

// 0.4 ms for each of n samples, and 10 ms more on rank 1, are equal times at n = 36.5 and 11.5. Speeds that were
// measured once, with equal parts, would give 32 + 16.
TEST(Balance, CountsWhatAStepCostsWhateverItsSize) {
  const Speed fixed = [](int rank, int) { return rank == 1 ? 10e-3 : 0; };
  const auto parts = parts_of_training(
      2, [](int, int) { return 0.4e-3; }, fixed);
  EXPECT_EQ(parts[10][0], 32);
  EXPECT_NEAR(static_cast<double>(parts[40][0]), 36.5, 1);
}

TEST(Balance, WithoutSamplesOnSomeRankPartsStay) {
  const Dataset data = samples();
  run(test_devices(3), [&](Rank& rank) {
    DataParallel net(new_net(rank), rank);
    Balance balance(net, rank, {.every = 1});
    Batches all = batches({data.x.slice(0, 0, 40), data.y.slice(0, 0, 40)}, {.size = 2}, rank);
    for (auto& batch : all) {
      EXPECT_EQ(batch.size(), rank.index() < 2 ? 1 : 0);
      net.loss(batch, F::cross_entropy).backward();
      EXPECT_FALSE(balance.step(batch, all));
    }
    EXPECT_THAT(balance.shares(), testing::IsEmpty());
  });
}

// A random net after two epochs, with parts by the times that the ranks take.
TensorBits balanced_bits(const RandomTask& task, int ranks) {
  const Dataset data = random_samples(task.seed, task.count);
  TensorBits bits;
  run(test_devices(ranks),
      [&](Rank& rank) {
        const auto module = rank.in_turn([&] { return random_net(task.seed); });
        DataParallel net(module, rank);
        Optimizer optimizer(net, maker_of(task));
        Balance balance(net, rank, {.every = 1});
        for (int epoch = 0; epoch < 2; ++epoch) {
          const BatchOptions options{.size = task.batch, .seed = task.seed, .epoch = epoch, .grain = task.grain};
          Batches all = batches(data.to(rank.device()), options, rank);
          for (auto& batch : all) {
            optimizer.zero_grad();
            net.loss(batch, F::cross_entropy).backward();
            optimizer.step();
            balance.step(batch, all);
          }
        }
        if (rank.index() == ranks - 1) bits = tensor_bits(*module);
      },
      {.seed = task.seed});
  return bits;
}

TEST(Balance, WithAGrainChangesNoBit) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    const RandomTask task = random_task(seed);
    EXPECT_EQ(balanced_bits(task, 2), balanced_bits(task, 1)) << to_string(task);
  }
}

TEST(Balance, SaysWhatItCannotMeasure) {
  run(test_devices(2), [&](Rank& rank) {
    DataParallel net(new_net(rank), rank);
    EXPECT_THAT(error_of([&] { Balance(net, rank, {.every = 0}); }), Refused());
    {
      const Balance one(net, rank);
      EXPECT_THAT(error_of([&] { Balance(net, rank); }), Refused());
    }
    const Balance another(net, rank);
    DataParallel unaveraged(new_net(rank), rank, {.average = false});
    EXPECT_THAT(error_of([&] { Balance(unaveraged, rank); }), Refused());
    DataParallel sharded(new_net(rank), rank, {.sharded = Sharded::gradients});
    EXPECT_THAT(error_of([&] { Balance(sharded, rank); }), Refused());
  });
}

}  // namespace balance_test
}  // namespace lockstep
