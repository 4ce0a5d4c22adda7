// Labels: arithmetic 3x3 2x4
// LocalSgd over 1 to 4 CPU ranks, against local SGD and DiLoCo written out for all ranks on one.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/lab/local_sgd.hpp>
#include <lockstep/ranks/traffic.hpp>

#include "support/group_tests.hpp"

#include <memory>
#include <string>
#include <vector>

namespace lockstep {
namespace local_sgd_test {

using torch::Tensor;
namespace F = torch::nn::functional;
namespace nn = torch::nn;
namespace optim = torch::optim;

using LocalSgdWorlds = Worlds;
INSTANTIATE_TEST_SUITE_P(Sizes, LocalSgdWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

constexpr int64_t global_size = 7;  // samples that 2 to 4 ranks share out unevenly

// Gives the same net on all ranks, whatever they draw meanwhile from what the ranks share.
nn::Linear start() {
  nn::Linear net(3, 2);
  net->to(torch::kDouble);
  const torch::NoGradGuard no_grad;
  net->weight.copy_(torch::linspace(-0.5, 0.7, 6).view({2, 3}));
  net->bias.copy_(torch::linspace(0.1, -0.2, 2));
  return net;
}

struct Samples {
  Tensor x = torch::randn({global_size, 3}, torch::kDouble), y = torch::randn({global_size, 2}, torch::kDouble);
};

Batch part_of_rank(const Samples& all, const Rank& rank) {
  const Range part = part_of(global_size, rank.index(), rank.world_size());
  return {all.x.narrow(0, part.begin, part.size()).to(rank.device()),
          all.y.narrow(0, part.begin, part.size()).to(rank.device()), global_size};
}

Batch part_of_rank(const Samples& all, int rank, int ranks) {
  const Range part = part_of(global_size, rank, ranks);
  return {all.x.narrow(0, part.begin, part.size()), all.y.narrow(0, part.begin, part.size()), global_size};
}

const auto mse = [](const Tensor& y_hat, const Tensor& y) { return F::mse_loss(y_hat, y); };

struct Case {
  int64_t sync_every;
  double outer_lr, outer_momentum, inner_momentum;
};

// Douillard et al. 2023, algorithm 1, with SGD inside; the rank's share of the gradient weighted by its samples.
std::vector<Tensor> by_hand(const Case& c, int ranks, const std::vector<Samples>& steps) {
  std::vector<nn::Linear> nets;
  std::vector<std::unique_ptr<optim::SGD>> inner;
  for (int rank = 0; rank < ranks; ++rank) {
    nets.push_back(start());
    inner.push_back(
        std::make_unique<optim::SGD>(nets[rank]->parameters(), optim::SGDOptions(0.1).momentum(c.inner_momentum)));
  }
  const auto global = start();
  optim::SGD outer(global->parameters(),
                   optim::SGDOptions(c.outer_lr).momentum(c.outer_momentum).nesterov(c.outer_momentum > 0));
  for (size_t step = 0; step < steps.size(); ++step) {
    for (int rank = 0; rank < ranks; ++rank) {
      const Batch batch = part_of_rank(steps[step], rank, ranks);
      inner[rank]->zero_grad();
      (mse(nets[rank]->forward(batch.x), batch.y) * (static_cast<double>(batch.size() * ranks) / global_size))
          .backward();
      inner[rank]->step();
    }
    const bool last = step + 1 == steps.size();
    if ((step + 1) % c.sync_every != 0 && !last) continue;
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < global->parameters().size(); ++i) {
      Tensor parameter = global->parameters()[i], mean = torch::zeros_like(parameter);
      for (const auto& net : nets) mean += net->parameters()[i] / ranks;
      parameter.mutable_grad() = parameter - mean;
    }
    outer.step();
    for (const auto& net : nets) {
      for (size_t i = 0; i < global->parameters().size(); ++i) net->parameters()[i].copy_(global->parameters()[i]);
    }
  }
  return global->parameters();
}

TEST_P(LocalSgdWorlds, FollowsTheAlgorithmWrittenOut) {
  const std::vector<Samples> steps(8);
  for (const Case& c : {Case{3, 1, 0, 0}, Case{3, 0.7, 0.9, 0.9}, Case{4, 0.5, 0, 0.5}, Case{100, 0.7, 0.9, 0}}) {
    const auto expected = by_hand(c, GetParam(), steps);
    on_ranks([&](Rank& rank) {
      DataParallel net(start(), rank, {.average = false});
      optim::SGD sgd(net->parameters(), optim::SGDOptions(0.1).momentum(c.inner_momentum));
      LocalSgd local(net->parameters(), rank,
                     {.sync_every = c.sync_every, .outer_lr = c.outer_lr, .outer_momentum = c.outer_momentum});
      for (size_t step = 0; step < steps.size(); ++step) {
        sgd.zero_grad();
        net.loss(part_of_rank(steps[step], rank), mse).backward();
        sgd.step();
        EXPECT_EQ(local.step(), (step + 1) % c.sync_every == 0) << step;
      }
      EXPECT_EQ(local.synchronize(), steps.size() % c.sync_every != 0);
      EXPECT_FALSE(local.synchronize());
      for (size_t i = 0; i < expected.size(); ++i) {
        const std::string what = "parameter " + std::to_string(i) + ", every " + std::to_string(c.sync_every);
        expect_near(net->parameters()[i].detach(), expected[i].detach(), 1e-12, what);
        expect_equal_on_all_ranks(net->parameters()[i], rank, what);
      }
    });
  }
}

TEST_P(LocalSgdWorlds, EveryStepItIsAveragedGradients) {
  const std::vector<Samples> steps(5);
  on_ranks([&](Rank& rank) {
    DataParallel net(start(), rank, {.average = false}), averaged(start(), rank);
    optim::SGD sgd(net->parameters(), 0.1), other(averaged->parameters(), 0.1);
    LocalSgd local(net->parameters(), rank);
    for (const auto& step : steps) {
      // There are two samples, so a third rank has none.
      const Batch all{step.x.narrow(0, 0, 2), step.y.narrow(0, 0, 2), 2};
      const Range part = part_of(2, rank.index(), rank.world_size());
      for (const Batch& batch :
           {part_of_rank(step, rank), Batch{all.x.narrow(0, part.begin, part.size()).to(rank.device()),
                                            all.y.narrow(0, part.begin, part.size()).to(rank.device()), 2}}) {
        sgd.zero_grad();
        other.zero_grad();
        net.loss(batch, mse).backward();
        averaged.loss(batch, mse).backward();
        sgd.step();
        other.step();
        EXPECT_TRUE(local.step());
        expect_near(net->weight.detach(), averaged->weight.detach(), 1e-12, "weight");
        expect_near(net->bias.detach(), averaged->bias.detach(), 1e-12, "bias");
      }
    }
  });
}

TEST_P(LocalSgdWorlds, GoesOnWithTheOuterMomentum) {
  on_ranks([](Rank& rank) {
    const LocalSgdOptions options{.sync_every = 2, .outer_lr = 0.7, .outer_momentum = 0.9};
    auto whole = start(), stopped = start();
    whole->to(rank.device());
    stopped->to(rank.device());
    const auto two_steps = [&](nn::Linear& net, LocalSgd& local, double by) {
      const torch::NoGradGuard no_grad;
      for (int step = 0; step < 2; ++step) {
        for (auto& parameter : net->parameters()) parameter.add_(by * (rank.index() + 1));
        local.step();
      }
    };
    LocalSgd of_whole(whole->parameters(), rank, options), before(stopped->parameters(), rank, options);
    EXPECT_TRUE(before.momentum().empty());
    two_steps(whole, of_whole, 0.1);
    two_steps(whole, of_whole, 0.2);
    two_steps(stopped, before, 0.1);
    LocalSgd after(stopped->parameters(), rank, options);
    after.set_momentum(before.momentum());
    two_steps(stopped, after, 0.2);
    EXPECT_TRUE(whole->weight.equal(stopped->weight));
    EXPECT_TRUE(whole->bias.equal(stopped->bias));
  });
}

TEST_P(LocalSgdWorlds, SendsTheParametersOncePerRound) {
  on_ranks([](Rank& rank) {
    const auto traffic = std::make_shared<Traffic>();
    Rank counted = Traffic::observed(rank, traffic);
    const auto here = torch::TensorOptions(rank.device());
    const Tensor frozen = torch::ones({50}, here), w = torch::ones({4, 5}, here).requires_grad_(),
                 single = torch::ones({3}, here.dtype(torch::kDouble)).requires_grad_();
    LocalSgd local({frozen, w, single, w}, counted, {.sync_every = 4});
    for (int step = 0; step < 8; ++step) local.step();
    EXPECT_DOUBLE_EQ(traffic->sent * rank.world_size() / 2, 2 * (80 + 24) * (rank.world_size() - 1));
  });
}

nn::Linear other_start() {
  nn::Linear net = start();
  const torch::NoGradGuard no_grad;
  for (auto& parameter : net->parameters()) parameter.mul_(-3).add_(0.25);
  return net;
}

void load(nn::LinearImpl& net, const nn::Linear& from) {
  const torch::NoGradGuard no_grad;
  net.weight.copy_(from->weight);
  net.bias.copy_(from->bias);
}

// Loads as load_weights() does after the optimizers were made; and between two rounds, from where ranks then start.
TEST_P(LocalSgdWorlds, AnOuterOptimizerStartsFromWeightsThatWereLoadedLater) {
  const std::vector<Samples> steps(8);
  const LocalSgdOptions options{.sync_every = 2, .outer_lr = 0.7, .outer_momentum = 0.9};
  on_ranks([&](Rank& rank) {
    const auto train = [&](DataParallel<nn::LinearImpl>& net, LocalSgd& local, size_t begin, size_t end) {
      optim::SGD sgd(net->parameters(), 0.1);
      for (size_t step = begin; step < end; ++step) {
        sgd.zero_grad();
        net.loss(part_of_rank(steps[step], rank), mse).backward();
        sgd.step();
        local.step();
      }
    };
    DataParallel net(start(), rank, {.average = false}), fresh(other_start(), rank, {.average = false});
    LocalSgd early(net->parameters(), rank, options), local(fresh->parameters(), rank, options);
    load(*net, other_start());
    train(net, early, 0, 4);
    train(fresh, local, 0, 4);
    expect_near(net->weight.detach(), fresh->weight.detach(), 1e-12, "loaded before the first step");

    load(*net, start());
    DataParallel anew(start(), rank, {.average = false});
    LocalSgd next(anew->parameters(), rank, options);
    next.set_momentum(local.momentum());
    train(net, early, 4, 8);
    train(anew, next, 4, 8);
    expect_near(net->weight.detach(), anew->weight.detach(), 1e-12, "loaded between rounds");
    expect_near(net->bias.detach(), anew->bias.detach(), 1e-12, "loaded between rounds");
  });
}

// Such a rank does not see that weights were loaded, since it computes no gradient.
TEST(LocalSgd, ARankWithoutSamplesStartsFromWeightsThatWereLoadedToo) {
  const Samples samples;
  run(test_devices(3), [&](Rank& rank) {
    const auto train = [&](DataParallel<nn::LinearImpl>& net, LocalSgd& local) {
      optim::SGD sgd(net->parameters(), 0.1);
      for (int step = 0; step < 4; ++step) {
        Batch batch = part_of_rank(samples, rank.index() == 2 ? 1 : rank.index(), 2);
        if (rank.index() == 2) batch = {batch.x.narrow(0, 0, 0), batch.y.narrow(0, 0, 0), global_size};
        sgd.zero_grad();
        net.loss(batch, mse).backward();
        sgd.step();
        local.step();
      }
    };
    const LocalSgdOptions options{.sync_every = 2, .outer_lr = 0.7, .outer_momentum = 0.9};
    DataParallel net(start(), rank, {.average = false}), fresh(other_start(), rank, {.average = false});
    LocalSgd early(net->parameters(), rank, options), local(fresh->parameters(), rank, options);
    load(*net, other_start());
    train(net, early);
    train(fresh, local);
    expect_near(net->weight.detach(), fresh->weight.detach(), 1e-12, "loaded before the first step");
  });
}

TEST(LocalSgd, WeightsThatOneRankAloneLoadsLaterAreRefusedOnAllRanks) {
  const Samples samples;
  for (const bool same : {false, true}) {  // the same after an evaluation with other weights on one rank
    std::vector<Caught> errors(3);
    run(test_devices(3), [&](Rank& rank) {
      DataParallel net(start(), rank, {.average = false});
      LocalSgd local(net->parameters(), rank, {.outer_lr = 0.7});
      if (rank.index() == 1) load(*net, other_start());
      if (rank.index() == 1 && same) load(*net, start());
      net.loss(part_of_rank(samples, rank), mse).backward();
      errors[static_cast<size_t>(rank.index())] = error_of([&] { local.step(); });
    });
    if (same) EXPECT_THAT(errors, testing::Each("(no error)"));
    if (!same) EXPECT_THAT(errors, testing::Each(Fails(Error::difference)));
  }
}

TEST(LocalSgd, RefusesWhatMakesNoSense) {
  const Tensor w = torch::ones({2}).requires_grad_();
  const auto refused = [&](const LocalSgdOptions& options, std::vector<Tensor> parameters) {
    return error_on_ranks(1, [&](Rank& rank) { LocalSgd local(parameters, rank, options); });
  };
  EXPECT_THAT(refused({.sync_every = 0}, {w}), Refused());
  EXPECT_THAT(refused({.outer_lr = 0}, {w}), Refused());
  EXPECT_THAT(refused({.outer_momentum = 1}, {w}), Refused());
  EXPECT_THAT(refused({}, {torch::ones({2})}), Refused());
  run(test_devices(1), [&](Rank& rank) {
    LocalSgd local({w}, rank, {.outer_momentum = 0.5});
    Tensor frozen = torch::ones({2});
    LocalSgd partly({w, frozen}, rank);
    frozen.requires_grad_();
    EXPECT_THAT(error_of([&] { partly.step(); }), Refused());
    EXPECT_THAT(error_of([&] { local.set_momentum({}); }), Refused());
    EXPECT_THAT(error_of([&] { local.set_momentum({torch::ones({3})}); }), Refused());
  });
}

// Makes the optimizer before the DataParallel, or when one rank has loaded weights.
TEST(LocalSgd, AnOuterOptimizerOfUnequalParametersIsRefusedOnAllRanks) {
  for (const double outer_lr : {0.7, 1.0}) {
    std::vector<Caught> errors(2);
    run(test_devices(2), [&](Rank& rank) {
      nn::Linear net = start();
      if (rank.index() == 1) net->weight.detach().mul_(2);
      net->to(rank.device());
      errors[static_cast<size_t>(rank.index())] =
          error_of([&] { LocalSgd(net->parameters(), rank, {.outer_lr = outer_lr}); });
    });
    if (outer_lr == 1.0) EXPECT_THAT(errors, testing::Each("(no error)"));
    if (outer_lr != 1.0) EXPECT_THAT(errors, testing::Each(Fails(Error::difference)));
  }
}

}  // namespace local_sgd_test
}  // namespace lockstep
