// Labels: concurrency arithmetic long
// Not under sanitizers: Seeds/*/5:Seeds/*/6:Seeds/*/7:Seeds/*/8:Seeds/*/9
// With a grain, training gives the same bits on any number of ranks, however their parts and averages are made.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>

#include "data_parallel/grain_tree.hpp"
#include "support/group_tests.hpp"
#include "support/random_training.hpp"
#include "support/tensor_bits.hpp"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace grains_test {

using lockstep::Batch;
using lockstep::batch_of;
using lockstep::blocks_of;
using lockstep::DataParallel;
using lockstep::Dataset;
using lockstep::error_on_ranks;
using lockstep::GrainBlock;
using lockstep::NoSync;
using lockstep::Optimizer;
using lockstep::random_net;
using lockstep::random_samples;
using lockstep::RandomTask;
using lockstep::Rank;
using lockstep::Sharded;
using testing::ElementsAre;
using torch::Tensor;
namespace F = torch::nn::functional;

// ---- The tree.

TEST(GrainTreeTest, ARunIsTheFewestBlocks) {
  EXPECT_THAT(blocks_of({0, 8}), ElementsAre(GrainBlock{0, 8}));
  EXPECT_THAT(blocks_of({3, 7}), ElementsAre(GrainBlock{3, 1}, GrainBlock{4, 2}, GrainBlock{6, 1}));
  EXPECT_THAT(blocks_of({1, 8}), ElementsAre(GrainBlock{1, 1}, GrainBlock{2, 2}, GrainBlock{4, 4}));
  EXPECT_THAT(blocks_of({2, 2}), ElementsAre());
}

// The tree as text: "((0 1) 2)".
std::string tree_over(const std::vector<int64_t>& runs) {
  std::vector<GrainBlock> all;
  std::vector<std::string> texts;
  for (size_t run = 0; run + 1 < runs.size(); ++run) {
    for (const auto& block : blocks_of({runs[run], runs[run + 1]})) {
      all.push_back(block);
      const std::function<std::string(int64_t, int64_t)> text = [&](int64_t begin, int64_t size) -> std::string {
        if (size == 1) return std::to_string(begin);
        return "(" + text(begin, size / 2) + " " + text(begin + size / 2, size / 2) + ")";
      };
      texts.push_back(text(block.begin, block.size));
    }
  }
  for (const auto& [into, from] : lockstep::additions_of(all))
    texts[into] = "(" + texts[into] + " " + texts[from] + ")";
  return texts.front();
}

TEST(GrainTreeTest, IsTheSameForAllRuns) {
  EXPECT_EQ(tree_over({0, 5}), "(((0 1) (2 3)) 4)");
  EXPECT_EQ(tree_over({0, 7}), "(((0 1) (2 3)) ((4 5) 6))");
  for (int64_t grains = 1; grains <= 17; ++grains) {
    const std::string whole = tree_over({0, grains});
    for (int64_t a = 0; a <= grains; ++a) {
      for (int64_t b = a; b <= grains; ++b) EXPECT_EQ(tree_over({0, a, b, grains}), whole) << a << " " << b;
    }
  }
}

// ---- Training.

struct Layout {
  int ranks = 1;
  std::vector<double> shares = {};
  int64_t parts = 1;  // under no_sync
  int zero = 0;       // the stage: a Sharded
  bool overlap = true;
  int64_t bucket_bytes = 4 << 20;
  bool changes_shares = false;          // after each batch
  std::vector<std::string> units = {};  // the units of stage 3
};

using Bits = lockstep::TensorBits;

// One rank's share grows, and then another's.
std::vector<double> shares_after(int steps, int ranks) {
  std::vector<double> shares(static_cast<size_t>(ranks), 1);
  shares[static_cast<size_t>(steps % ranks)] += steps;
  return shares;
}

// The weights after two epochs.
Bits train(const RandomTask& task, const Layout& layout) {
  const Dataset data = random_samples(task.seed, task.count);
  Bits bits;
  lockstep::run(
      lockstep::test_devices(layout.ranks),
      [&](Rank& rank) {
        auto module = rank.in_turn([&] { return random_net(task.seed); });
        DataParallel net(module, rank,
                         {.bucket_bytes = layout.bucket_bytes,
                          .first_bucket_bytes = layout.bucket_bytes,
                          .overlap = layout.overlap,
                          .sharded = static_cast<Sharded>(layout.zero),
                          .units = layout.units});
        Optimizer optimizer(net, maker_of(task));
        int steps = 0;
        for (int epoch = 0; epoch < 2; ++epoch) {
          auto all = lockstep::batches(
              data.to(rank.device()),
              {.size = task.batch, .seed = task.seed, .epoch = epoch, .shares = layout.shares, .grain = task.grain},
              rank);
          for (auto& batch : all) {
            optimizer.zero_grad();
            const auto parts = batch.in_parts(layout.parts);
            for (size_t part = 0; part < parts.size(); ++part) {
              std::optional<NoSync> more;
              if (part + 1 < parts.size()) more.emplace(net.replica());
              net.loss(parts[part], F::cross_entropy).backward();
            }
            optimizer.step();
            if (layout.changes_shares) all.set_shares(shares_after(++steps, layout.ranks));
          }
        }
        const auto whole = net.whole();
        if (rank.index() == rank.world_size() - 1) bits = lockstep::tensor_bits(*module);
      },
      {.seed = task.seed});
  return bits;
}

class GrainsTest : public testing::TestWithParam<uint64_t> {
 protected:
  static RandomTask task() { return lockstep::random_task(GetParam()); }
};

TEST_P(GrainsTest, TheNumberOfRanksChangesNoBit) {
  const Bits one = train(task(), {});
  for (const int ranks : {2, 3, 5, 8})
    EXPECT_EQ(train(task(), {.ranks = ranks}), one) << ranks << " " << to_string(task());
}

TEST_P(GrainsTest, TheWayToAverageChangesNoBit) {
  const Bits one = train(task(), {});
  EXPECT_EQ(train(task(), {.ranks = 2, .overlap = false}), one) << to_string(task());
  EXPECT_EQ(train(task(), {.ranks = 3, .bucket_bytes = 1}), one) << to_string(task());
  EXPECT_EQ(train(task(), {.ranks = 1, .parts = 3}), one) << to_string(task());
  EXPECT_EQ(train(task(), {.ranks = 3, .parts = 2}), one) << to_string(task());
  EXPECT_EQ(train(task(), {.ranks = 3, .shares = {3, 0, 1}}), one) << to_string(task());
  EXPECT_EQ(train(task(), {.ranks = 2, .changes_shares = true}), one) << to_string(task());
}

TEST_P(GrainsTest, ZeroChangesNoBit) {
  const Bits one = train(task(), {});
  for (const int stage : {1, 2}) {
    EXPECT_EQ(train(task(), {.ranks = 1, .zero = stage}), one) << to_string(task());
    EXPECT_EQ(train(task(), {.ranks = 2, .zero = stage, .bucket_bytes = 64}), one) << to_string(task());
    EXPECT_EQ(train(task(), {.ranks = 3, .parts = 2, .zero = stage, .overlap = false}), one) << to_string(task());
  }
}

// The ranks have unequal numbers of grains, also none, and each use of a parameter is a call of all of them.
TEST_P(GrainsTest, DividedParametersChangeNoBit) {
  const Bits one = train(task(), {});
  for (const int ranks : {1, 2, 3, 4, 5, 6, 7, 8}) {
    EXPECT_EQ(train(task(), {.ranks = ranks, .zero = 3}), one) << ranks << " " << to_string(task());
  }
  const std::vector<std::string> units = {"in", "uneven", "out"};
  EXPECT_EQ(train(task(), {.ranks = 3, .zero = 3, .units = units}), one) << to_string(task());
  EXPECT_EQ(train(task(), {.ranks = 5, .zero = 3, .overlap = false, .units = units}), one) << to_string(task());
  EXPECT_EQ(train(task(), {.ranks = 3, .parts = 2, .zero = 3, .units = units}), one) << to_string(task());
  EXPECT_EQ(train(task(), {.ranks = 4, .parts = 3, .zero = 3, .units = units}), one) << to_string(task());
  EXPECT_EQ(train(task(), {.ranks = 3, .shares = {3, 0, 1}, .zero = 3, .units = units}), one) << to_string(task());
}

INSTANTIATE_TEST_SUITE_P(Seeds, GrainsTest, testing::Range<uint64_t>(1, 13));

// ---- The gradients are still those of the whole batch.

TEST(GrainGradientsTest, AreThoseOfTheMeanLossOfTheBatch) {
  const Dataset data = random_samples(3, 19);
  lockstep::run(lockstep::test_devices(3), [&](Rank& rank) {
    auto module = rank.in_turn([] { return random_net(3); }), plain = rank.in_turn([] { return random_net(3); });
    for (auto net : {module, plain}) {
      net->to(torch::kDouble);
      net->eval();  // no dropout
    }
    const Dataset doubles{data.x.to(torch::kDouble) * 0.1, data.y};
    DataParallel net(module, rank);
    for (const auto& batch : lockstep::batches(doubles, {.size = 19, .shuffle = false, .grain = 4}, rank)) {
      net.loss(batch, F::cross_entropy).backward();
    }
    F::cross_entropy(plain->forward(doubles.x), doubles.y).backward();
    const auto mine = module->parameters(), theirs = plain->parameters();
    for (size_t i = 0; i < mine.size(); ++i) {
      lockstep::expect_near(mine[i].grad(), theirs[i].grad(), 1e-12, module->named_parameters().keys()[i]);
    }
  });
}

// Two batches may be one step.
TEST(GrainGradientsTest, AddToThoseOfTheBatchBefore) {
  const Dataset data = random_samples(4, 20);
  const auto gradients = [&](int ranks, std::vector<int64_t> firsts, bool keeps_zeros) {
    std::vector<Tensor> gradients;
    lockstep::run(lockstep::test_devices(ranks), [&](Rank& rank) {
      torch::nn::Linear module = rank.in_turn([] { return torch::manual_seed(4), torch::nn::Linear(4, 3); });
      DataParallel net(module, rank);
      if (keeps_zeros) module->weight.mutable_grad() = torch::zeros_like(module->weight);
      for (const int64_t first : firsts) {
        const Dataset half{data.x.narrow(0, first, 10), data.y.narrow(0, first, 10)};
        for (const auto& batch : lockstep::batches(half.to(rank.device()), {.size = 10, .grain = 3}, rank)) {
          net.loss(batch, F::cross_entropy).backward();
        }
      }
      if (rank.index() == 0) gradients = {module->weight.grad().cpu(), module->bias.grad().cpu()};
    });
    return gradients;
  };
  const auto one = gradients(1, {0}, false), other = gradients(1, {10}, false);
  for (const int ranks : {1, 3}) {
    for (const bool keeps_zeros : {false, true}) {
      const auto both = gradients(ranks, {0, 10}, keeps_zeros);
      for (size_t i = 0; i < both.size(); ++i) EXPECT_TRUE(both[i].equal(one[i] + other[i])) << ranks << " " << i;
    }
  }
}

// A single rank has no memory for its gradients before the first grain. In a run of several it is a group.
TEST(GrainGradientsTest, OfOneRankAddToThoseOfABatchWithoutGrains) {
  for (const int ranks : {1, 2}) {
    lockstep::run(lockstep::test_devices(ranks), [](Rank& rank) {
      Rank own = rank.group(rank.index());
      torch::nn::Linear module(4, 3);
      DataParallel net(module, own);
      const auto gradient_of = [&](const Batch& batch) {
        net.loss(batch, F::cross_entropy).backward();
        return module->weight.grad().clone();
      };
      Batch plain = batch_of(own, 8, 2);
      plain.grain = 0;
      const Tensor first = gradient_of(plain), both = gradient_of(batch_of(own, 8, 2));
      net->zero_grad();
      EXPECT_TRUE(both.equal(first + gradient_of(batch_of(own, 8, 2))));
    });
  }
}

TEST(GrainRunningStatisticsTest, AreThoseOfALoopOverTheGrains) {
  const Dataset data = random_samples(3, 11);
  const Tensor x = data.x.to(torch::kDouble);
  torch::nn::BatchNorm1d plain(4);
  plain->to(torch::kDouble);
  for (int64_t begin = 0; begin < 11; begin += 3) plain->forward(x.slice(0, begin, std::min<int64_t>(begin + 3, 11)));
  lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
    torch::nn::BatchNorm1d norm(4);
    torch::nn::Sequential module(norm, torch::nn::Linear(4, 3));
    module->to(torch::kDouble);
    DataParallel net(module, rank);
    for (const auto& batch : lockstep::batches({x, data.y}, {.size = 11, .shuffle = false, .grain = 3}, rank)) {
      net.loss(batch, F::cross_entropy).backward();
    }
    lockstep::expect_near(norm->running_mean, plain->running_mean, 1e-12, "running_mean");
    lockstep::expect_near(norm->running_var, plain->running_var, 1e-12, "running_var");
    EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 4);
  });
}

// The batch before may have had a grain.
TEST(GrainLossTest, WithoutGrainsGoesWithOtherBatches) {
  const auto error = error_on_ranks(2, [](Rank& rank) {
    DataParallel net(torch::nn::Linear(4, 3), rank);
    const auto train = [&](const Batch& batch) {
      net->zero_grad();
      net.mean(F::cross_entropy(net(batch.x), batch.y), batch.size(), batch.global_size).backward();
    };
    for (const bool others : {true, false}) {
      for (auto& batch : lockstep::batches(random_samples(1, 10), {.size = 10, .grain = 4}, rank)) {
        net.loss(batch, F::cross_entropy).backward();
        train({torch::randn({rank.index() + 1, 4}), torch::zeros({rank.index() + 1}, torch::kLong), 3});
        if (!others) continue;
        for (auto& other : lockstep::batches(random_samples(1, 10), {.size = 10}, rank)) train(other);
      }
    }
    const Dataset data = random_samples(2, 10);
    const auto own = lockstep::part_of(10, rank.index(), 2);
    train({data.x.slice(0, own.begin, own.end), data.y.slice(0, own.begin, own.end), 10});
  });
  EXPECT_EQ(error, "(no error)");
}

// A loss of one's own, as in a batch without a grain.
TEST(GrainLossTest, OfOnesOwnGetsEachGrain) {
  lockstep::run(lockstep::test_devices(2), [](Rank& rank) {
    torch::nn::Linear module(4, 3);
    DataParallel net(module, rank);
    for (const int64_t grain : {0, 3}) {
      std::vector<int64_t> sizes;
      auto loss = net.loss(batch_of(rank, 10, grain), [&](const Batch& part) {
        sizes.push_back(part.size());
        return F::cross_entropy(net(part.x), part.y);
      });
      loss.backward();
      const auto expected = grain == 0          ? std::vector<int64_t>{5}
                            : rank.index() == 0 ? std::vector<int64_t>{3, 3}
                                                : std::vector<int64_t>{3, 1};
      EXPECT_EQ(sizes, expected);
    }
  });
}

// A learning rate may follow it. In float64, whose sums are rounded; with grains of unequal sizes, and ranks without
// one.
TEST(GrainLossTest, OfTheWholeBatchHasTheSameBitsOnAnyNumberOfRanks) {
  Dataset data = random_samples(8, 413);
  data.x = data.x.to(torch::kDouble);
  std::vector<double> expected;
  for (const int ranks : {1, 2, 3, 5, 8}) {
    for (const int stage : {0, 3}) {
      std::vector<double> losses;
      lockstep::run(lockstep::test_devices(ranks), [&](Rank& rank) {
        auto module = rank.in_turn([] { return random_net(4); });
        module->to(torch::kDouble);
        DataParallel net(module, rank, {.sharded = static_cast<Sharded>(stage)});
        for (const auto& batch :
             lockstep::batches(data.to(rank.device()), {.size = 20, .shuffle = false, .grain = 3}, rank)) {
          const double loss = net.loss(batch, F::cross_entropy).global_item();
          if (rank.index() == 0) losses.push_back(loss);
        }
      });
      if (expected.empty()) expected = losses;
      EXPECT_EQ(losses, expected) << ranks << " ranks, stage " << stage;
    }
  }
  EXPECT_EQ(expected.size(), 21u);
}

// One with a dimension is as good as one without.
TEST(GrainLossTest, MayBeATensorOfOneValue) {
  lockstep::run(lockstep::test_devices(2), [](Rank& rank) {
    DataParallel net(torch::nn::Linear(4, 3), rank);
    const Batch batch = batch_of(rank, 10, 3);
    auto loss = net.loss(batch, [&](const Batch& part) { return F::cross_entropy(net(part.x), part.y).view({1}); });
    EXPECT_EQ(loss.global_item(), net.loss(batch, F::cross_entropy).global_item());
    loss.backward();
  });
}

}  // namespace grains_test
