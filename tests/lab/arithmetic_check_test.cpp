// Labels: concurrency arithmetic
// check_arithmetic: a grain that one rank computes wrongly is found and the rank named, and training's bits stay the
// same.
#include "lab/arithmetic_check.hpp"

#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/devices/autocast.hpp>
#include <lockstep/lab/check_arithmetic.hpp>
#include <lockstep/nn/dropout.hpp>

#include "support/group_tests.hpp"
#include "support/tensor_bits.hpp"
#include "support/unit_gradient.hpp"

#include <atomic>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {
namespace arithmetic_check_test {

using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::IsEmpty;
namespace F = torch::nn::functional;

// ---- Which grains are drawn.

TEST(DrawnGrains, AreAllOfThemOnceIfTheFractionIsOne) {
  for (int64_t step = 0; step < 20; ++step) {
    std::set<int64_t> numbers;
    for (const auto& grain : drawn_grains(1, 7, step, {0, 3, 3, 8})) {
      EXPECT_TRUE(numbers.insert(grain.number).second);
      EXPECT_EQ(grain.owner, grain.number < 3 ? 0 : 2);
      EXPECT_NE(grain.checker, grain.owner);
      EXPECT_TRUE(grain.checker >= 0 && grain.checker < 3) << grain.checker;
    }
    EXPECT_EQ(numbers.size(), 8u);
  }
}

TEST(DrawnGrains, AreTheFractionOfManySteps) {
  std::vector<int> times(8, 0), checked(4, 0);
  int steps_with_some = 0;
  for (int64_t step = 0; step < 8000; ++step) {
    const auto grains = drawn_grains(0.05, 7, step, {0, 2, 4, 6, 8});
    for (const auto& grain : grains) {
      ++times[static_cast<size_t>(grain.number)];
      ++checked[static_cast<size_t>(grain.checker)];
    }
    if (!grains.empty()) ++steps_with_some;
    EXPECT_TRUE(grains.empty() || grains.size() == 4) << "ranks check at the same time, step " << step;
  }
  EXPECT_THAT(times, Each(testing::AllOf(testing::Gt(320), testing::Lt(480))));
  EXPECT_THAT(checked, Each(testing::AllOf(testing::Gt(700), testing::Lt(900))));
  EXPECT_NEAR(steps_with_some, 800, 100);
}

TEST(DrawnGrains, FollowFromSeedAndStepAndNeedTwoRanks) {
  EXPECT_EQ(drawn_grains(1, 7, 3, {0, 4, 8}), drawn_grains(1, 7, 3, {0, 4, 8}));
  EXPECT_THAT(drawn_grains(1, 7, 3, {0, 8}), IsEmpty());
  const auto steps_of = [](uint64_t seed) {
    std::vector<bool> steps;
    for (int64_t step = 0; step < 200; ++step) steps.push_back(!drawn_grains(0.1, seed, step, {0, 2, 4}).empty());
    return steps;
  };
  EXPECT_NE(steps_of(1), steps_of(2));
}

// ---- Who is wrong.

TEST(WrongRanks, AreThoseThatTheMajorityContradicts) {
  const CheckedGrain grain{.number = 5, .owner = 0, .checker = 2};
  const GrainHashes right{1, 2}, other{1, 3}, third{9, 9};
  EXPECT_THAT(wrong_ranks(grain, other, right, {right, right, right}), ElementsAre(0));  // once
  EXPECT_THAT(wrong_ranks(grain, other, right, {other, right, right}), ElementsAre(0));  // always
  EXPECT_THAT(wrong_ranks(grain, right, other, {right, right, other}), ElementsAre(2));
  EXPECT_THAT(wrong_ranks(grain, right, other, {right, third, right}), ElementsAre(1, 2));
  EXPECT_THAT(wrong_ranks(grain, other, third, {right, right, right}), ElementsAre(0, 2));
  EXPECT_THAT(wrong_ranks(grain, other, right, {other, third, right}), IsEmpty());
  const CheckedGrain of_two{.number = 5, .owner = 1, .checker = 0};
  EXPECT_THAT(wrong_ranks(of_two, other, right, {right, right}), ElementsAre(1));  // rank 1 contradicts itself
  EXPECT_THAT(wrong_ranks(of_two, other, right, {right, other}), IsEmpty());
}

// ---- Training.

using Fault = std::function<bool(const SampleScope::Place&)>;

// A bit of the first value is flipped, as a faulty core does it.
torch::Tensor with_a_flipped_bit(const torch::Tensor& values) {
  torch::Tensor wrong = values.detach().clone();
  wrong.view(torch::kInt).flatten()[0].bitwise_xor_(1 << 20);
  return values + (wrong - values.detach());
}

struct NetImpl : torch::nn::Module {
  torch::nn::Linear in = register_module("in", torch::nn::Linear(4, 6));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(6));
  Dropout dropout = register_module("dropout", Dropout(0.3));
  torch::nn::Linear rare = register_module("rare", torch::nn::Linear(6, 6));
  torch::nn::Linear out = register_module("out", torch::nn::Linear(6, 3));
  Fault fault;

  torch::Tensor forward(const torch::Tensor& x) {
    torch::Tensor h = dropout(norm(torch::relu(in(x))));
    if (x.flatten()[0].item<float>() > 0.5) h = h + rare(h);  // some grains have no gradient of it
    h = out(h);
    return fault && fault(SampleScope::current()->place()) ? with_a_flipped_bit(h) : h;
  }
};
TORCH_MODULE(Net);

struct Job {
  int ranks = 2;
  double fraction = 1;
  int64_t parts = 1;  // under no_sync
  int zero = 0;
  bool by_function = false;
  std::function<bool(int rank, const SampleScope::Place&)> fault = {};
  std::function<void(NetImpl&, int rank)> before_second_step = {};
};

struct Outcome {
  TensorBits bits;
  std::vector<Caught> errors;  // errors of the ranks
  int computed_again = 0;
};

// Two epochs of two steps, of six grains each.
Outcome train(const Job& job) {
  torch::manual_seed(5);
  const Dataset data{torch::rand({48, 4}), torch::arange(48) % 3};
  Outcome outcome;
  outcome.errors.resize(static_cast<size_t>(job.ranks));
  std::atomic<int> again = 0;
  run(test_devices(static_cast<size_t>(job.ranks)), [&](Rank& rank) {
    Net module = rank.in_turn([] {
      torch::manual_seed(1);
      return Net();
    });
    if (job.fault) module->fault = [&](const SampleScope::Place& place) { return job.fault(rank.index(), place); };
    DataParallel net(module, rank,
                     {.sharded = static_cast<Sharded>(job.zero),
                      .grain_check = job.fraction > 0 ? check_arithmetic(job.fraction) : nullptr});
    Optimizer sgd(net, torch::optim::SGDOptions(0.1).momentum(0.9));
    const auto mean_of = [&](const Batch& grain) {
      if (SampleScope::current()->place().again) ++again;
      return F::cross_entropy(net(grain.x), grain.y);
    };
    int steps = 0;
    const auto step = [&](const Batch& batch) {
      if (++steps == 2 && job.before_second_step) job.before_second_step(*module, rank.index());
      sgd.zero_grad();
      const auto parts = batch.in_parts(job.parts);
      for (size_t part = 0; part < parts.size(); ++part) {
        std::optional<NoSync> more;
        if (part + 1 < parts.size()) more.emplace(net.replica());
        job.by_function ? net.loss(parts[part], mean_of).backward()
                        : net.loss(parts[part], F::cross_entropy).backward();
      }
      sgd.step();
    };
    outcome.errors[static_cast<size_t>(rank.index())] = error_of([&] {
      for (int epoch = 0; epoch < 2; ++epoch) {
        for (auto& batch : batches(data.to(rank.device()), {.size = 24, .epoch = epoch, .grain = 4}, rank)) step(batch);
      }
    });
    if (rank.index() == rank.world_size() - 1) outcome.bits = tensor_bits(*module);
  });
  outcome.computed_again = again;
  return outcome;
}

TEST(CheckArithmetic, ChangesNoBit) {
  const Outcome without = train({.fraction = 0, .by_function = true});
  ASSERT_THAT(without.errors, Each("(no error)"));
  EXPECT_EQ(without.computed_again, 0);
  for (const Job& job : {Job{.by_function = true}, Job{.ranks = 3, .by_function = true},
                         Job{.ranks = 3, .parts = 2, .by_function = true}, Job{.zero = 1, .by_function = true},
                         Job{.ranks = 3, .zero = 2, .by_function = true}}) {
    const Outcome with = train(job);
    EXPECT_THAT(with.errors, Each("(no error)"));
    EXPECT_EQ(with.bits, without.bits) << job.ranks << " ranks, " << job.parts << " parts, stage " << job.zero;
    EXPECT_EQ(with.computed_again, 4 * 6) << "all grains of four steps";
  }
  EXPECT_EQ(train({.ranks = 3}).bits, without.bits) << "with a criterion";
  EXPECT_EQ(train({.ranks = 1, .by_function = true}).computed_again, 0) << "nobody else is there";
}

bool is_grain(const SampleScope::Place& place, int64_t step, int64_t number) {
  return place.step == step && place.first == 4 * number;
}

TEST(CheckArithmetic, ARankThatComputesWronglyOnceIsNamed) {
  for (const int ranks : {2, 3}) {
    const auto once = [&](int rank, const SampleScope::Place& place) {
      return rank == ranks - 1 && is_grain(place, 2, 5) && !place.again;
    };
    EXPECT_THAT(train({.ranks = ranks, .fault = once}).errors, Each(Fails(Error::machine, {ranks - 1})));
    EXPECT_THAT(train({.ranks = ranks, .fraction = 0, .fault = once}).errors, Each("(no error)"));
  }
}

TEST(CheckArithmetic, ARankThatAlwaysComputesWronglyIsNamedByTheMajority) {
  const auto always = [](int rank, const SampleScope::Place&) { return rank == 1; };
  EXPECT_THAT(train({.ranks = 3, .fault = always}).errors, Each(Fails(Error::machine, {1})));
  EXPECT_THAT(train({.ranks = 2, .fault = always}).errors, Each(Fails(Error::machine)));
}

TEST(CheckArithmetic, AFlippedWeightIsToldFromWrongArithmetic) {
  const auto flip = [](NetImpl& net, int rank) {
    if (rank == 2) net.out->bias.data().view(torch::kInt)[1].bitwise_xor_(1 << 20);
  };
  EXPECT_THAT(train({.ranks = 3, .before_second_step = flip}).errors, Each(Fails(Error::machine, {2})));
}

// Images with their channels last, of which some ranks have none; and in mixed precision.
TEST(CheckArithmetic, ComputesAgainAsItWasComputedFirst) {
  const Dataset images{torch::rand({24, 2, 6, 6}), torch::arange(24) % 3};
  for (const bool bf16 : {false, true}) {
    run(test_devices(3), [&](Rank& rank) {
      torch::nn::Sequential module = rank.in_turn([] {
        torch::manual_seed(1);
        return torch::nn::Sequential(torch::nn::Conv2d(2, 8, 3), torch::nn::ReLU(), torch::nn::Flatten(),
                                     torch::nn::Linear(8 * 4 * 4, 3));
      });
      DataParallel net(module, rank, {.grain_check = check_arithmetic(1)});
      for (auto& batch : batches(images.to(rank.device()), {.size = 8, .grain = 4}, rank)) {
        batch.x = batch.x.contiguous(at::MemoryFormat::ChannelsLast);
        EXPECT_EQ(error_of([&] {
                    std::optional<Loss> loss;
                    {
                      const Autocast precision(rank.device(), torch::kBFloat16, bf16);
                      loss.emplace(net.loss(batch, F::cross_entropy));
                    }
                    loss->backward();
                  }),
                  "(no error)");
      }
    });
  }
}

// A loss of 16 bits cannot hold the weight of a grain.
TEST(CheckArithmetic, LeavesTheGradientsOfALowPrecisionLoss) {
  for (const auto type : {torch::kDouble, torch::kBFloat16, torch::kHalf}) {
    run(test_devices(2), [&](Rank& rank) {
      DataParallel net(std::make_shared<UnitGradient>(), rank, {.grain_check = check_arithmetic(1)});
      for (auto& batch : batches(ones_of(600), {.size = 600, .grain = 257}, rank)) {
        net.loss(batch, mean_in(type)).backward();
      }
      EXPECT_NEAR(net->w.grad().item<double>(), 1, 1e-14) << type;
    });
  }
}

TEST(CheckArithmetic, RefusesWhatItCannotCheck) {
  const Dataset data{torch::rand({8, 4}), torch::arange(8) % 3};
  for (const double fraction : {-0.1, 0.0, 1.5, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THAT(error_of([&] { check_arithmetic(fraction); }), Refused()) << fraction;
  }
  run(test_devices(2), [&](Rank& rank) {
    const auto check = check_arithmetic(0.5);
    DataParallel net(Net(), rank, {.grain_check = check});
    EXPECT_THAT(error_of([&] { DataParallel(Net(), rank, {.grain_check = check}); }), Refused());
    const DataParallelOptions divided{.sharded = Sharded::parameters, .grain_check = check_arithmetic(0.5)};
    EXPECT_THAT(error_of([&] { DataParallel(Net(), rank, divided); }), Refused());
    for (const auto& batch : batches(data.to(rank.device()), {.size = 8}, rank)) {
      EXPECT_THAT(error_of([&] { net.loss(batch, F::cross_entropy).backward(); }), Refused());
    }
  });
}

}  // namespace arithmetic_check_test
}  // namespace lockstep
