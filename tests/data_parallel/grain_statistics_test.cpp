// Labels: concurrency
// GrainStatistics on 1 to 9 CPU ranks: the same bits, and those of LibTorch's own updates grain by grain.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/base/error.hpp>

#include "data_parallel/grain_statistics.hpp"
#include "support/group_tests.hpp"

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace grain_statistics_test {

using namespace lockstep;
using torch::Tensor;
namespace nn = torch::nn;

constexpr int64_t kGrains = 7;
constexpr int kBatches = 3;

// Layers of each kind, for x of [samples, 3, 8].
struct Net : nn::Module {
  nn::Conv1d conv = register_module("conv", nn::Conv1d(3, 5, 3));
  nn::BatchNorm1d usual = register_module("usual", nn::BatchNorm1d(5));
  nn::BatchNorm2d quick = register_module("quick", nn::BatchNorm2d(nn::BatchNormOptions(5).momentum(0.7)));
  nn::BatchNorm3d mean = register_module("mean", nn::BatchNorm3d(nn::BatchNormOptions(5).momentum(std::nullopt)));
  nn::InstanceNorm1d each =
      register_module("each", nn::InstanceNorm1d(nn::InstanceNorm1dOptions(5).track_running_stats(true)));
  nn::BatchNorm1d without =
      register_module("without", nn::BatchNorm1d(nn::BatchNormOptions(5).track_running_stats(false)));

  Tensor forward(const Tensor& x) {
    Tensor y = usual(conv(x)).tanh();
    y = quick(y.view({-1, 5, 2, 3})).exp();
    y = mean(y.view({-1, 5, 3, 1, 2})).view({-1, 5, 6});
    return without(each(y.exp())).sum();
  }
};

// Grains of 1 to 3 samples.
std::vector<Tensor> grains_of(int batch, torch::ScalarType type) {
  torch::manual_seed(100 + batch);
  std::vector<Tensor> grains;
  for (int64_t grain = 0; grain < kGrains; ++grain) {
    grains.push_back((torch::randn({1 + grain % 3, 3, 8}, torch::kDouble) * (grain + 1) + batch).to(type));
  }
  return grains;
}

Net net_of(torch::ScalarType type) {
  torch::manual_seed(1);
  Net net;
  net.to(type);
  return net;
}

std::vector<Tensor> buffers_of(const nn::Module& net) {
  std::vector<Tensor> values;
  for (const auto& buffer : net.buffers()) values.push_back(buffer.detach().clone());
  return values;
}

void expect_equal(const std::vector<Tensor>& actual, const std::vector<Tensor>& expected, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) EXPECT_TRUE(actual[i].equal(expected[i])) << what << ", buffer " << i;
}

std::vector<int64_t> near_equal_runs(int ranks) {
  std::vector<int64_t> runs{0};
  for (int rank = 0; rank < ranks; ++rank) runs.push_back(part_of(kGrains, rank, ranks).end);
  return runs;
}

// The buffers after some batches, which are the same on all ranks.
std::vector<Tensor> trained_on(const std::vector<int64_t>& runs, torch::ScalarType type) {
  std::vector<std::vector<Tensor>> batches;
  for (int batch = 0; batch < kBatches; ++batch) batches.push_back(grains_of(batch, type));
  const Net made = net_of(type);
  std::vector<Tensor> result;
  run(test_devices(runs.size() - 1), [&](Rank& rank) {
    Net net = rank.in_turn([&] { return net_of(type); });
    GrainStatistics statistics(net, rank);
    for (const auto& grains : batches) {
      const auto before = buffers_of(net);
      for (int64_t number = runs[rank.index()]; number < runs[rank.index() + 1]; ++number) {
        statistics.forward(number, [&] { net.forward(grains[number].clone()); });
      }
      expect_equal(buffers_of(net), before, "before finish()");
      statistics.finish(runs);
    }
    for (const auto& buffer : net.named_buffers()) expect_equal_on_all_ranks(buffer.value(), rank, buffer.key());
    if (rank.index() == 0) result = buffers_of(net);
  });
  return result;
}

TEST(GrainStatistics, HaveTheSameBitsOnAnyNumberOfRanks) {
  for (const auto type : {torch::kFloat, torch::kDouble}) {
    const auto expected = trained_on({0, kGrains}, type);
    ASSERT_FALSE(expected[0].equal(torch::zeros_like(expected[0])));
    for (const int ranks : {2, 3, 5, 9}) {
      expect_equal(trained_on(near_equal_runs(ranks), type), expected, std::to_string(ranks) + " ranks");
    }
    expect_equal(trained_on({0, 0, 6, 6, 7}, type), expected, "ranks without grains");
  }
}

TEST(GrainStatistics, AreThoseOfAPlainLoop) {
  for (const auto& [type, tolerance] : {std::pair(torch::kDouble, 1e-12), std::pair(torch::kFloat, 1e-5)}) {
    Net plain = net_of(type);
    for (int batch = 0; batch < kBatches; ++batch) {
      for (const auto& grain : grains_of(batch, type)) plain.forward(grain);
    }
    const auto actual = trained_on(near_equal_runs(3), type);
    const auto expected = plain.named_buffers();
    for (size_t i = 0; i < actual.size(); ++i) {
      expect_near(actual[i], expected[i].value(), tolerance, expected[i].key());
      if (expected[i].value().scalar_type() != torch::kLong) {
        EXPECT_GT((expected[i].value() - i % 3).abs().max().item<double>(), 0.01) << expected[i].key();
      }
    }
    EXPECT_EQ(plain.usual->num_batches_tracked.item<int64_t>(), kBatches * kGrains);
  }
}

// LibTorch changes the statistics once per call.
TEST(GrainStatistics, OfALayerThatIsCalledSeveralTimesAreThoseOfAPlainLoop) {
  struct Shared : nn::Module {
    explicit Shared(std::optional<double> momentum)
        : norm(register_module("norm", nn::BatchNorm1d(nn::BatchNormOptions(4).momentum(momentum)))),
          each(register_module("each", nn::InstanceNorm1d(nn::InstanceNorm1dOptions(4).track_running_stats(true)))) {
      register_module("norm_again", norm);
      to(torch::kDouble);
    }
    Tensor forward(Tensor x, int64_t times) {
      for (int64_t time = 0; time < times; ++time) x = norm(each(x * 2 + 1)).exp();
      return x;
    }
    nn::BatchNorm1d norm;
    nn::InstanceNorm1d each;
  };
  torch::manual_seed(2);
  const Tensor x = torch::randn({kGrains, 5, 4, 3}, torch::kDouble);
  for (const auto momentum : {std::optional(0.1), std::optional(1.0), std::optional<double>()}) {
    Shared plain(momentum);
    for (int64_t grain = 0; grain < kGrains; ++grain) plain.forward(x[grain], grain % 4);
    run(test_devices(2), [&](Rank& rank) {
      Shared net(momentum);
      GrainStatistics statistics(net, rank);
      const auto runs = near_equal_runs(2);
      for (int64_t grain = runs[rank.index()]; grain < runs[rank.index() + 1]; ++grain) {
        statistics.forward(grain, [&] { net.forward(x[grain], grain % 4); });
      }
      statistics.finish(runs);
      for (const auto& buffer : net.named_buffers()) {
        expect_near(buffer.value(), plain.named_buffers()[buffer.key()], 1e-12, buffer.key());
      }
    });
    EXPECT_EQ(plain.norm->num_batches_tracked.item<int64_t>(), 9);
  }
}

TEST(GrainStatistics, InEvalModeStay) {
  const auto grains = grains_of(0, torch::kDouble);
  Net plain = net_of(torch::kDouble);
  plain.usual->running_mean.fill_(0.25);
  plain.usual->eval();
  std::vector<Tensor> outputs;
  for (int64_t grain = 0; grain < kGrains; ++grain) {
    plain.quick->train(grain != 4);
    outputs.push_back(plain.forward(grains[grain]).detach());
  }
  run(test_devices(3), [&](Rank& rank) {
    Net net = rank.in_turn([] { return net_of(torch::kDouble); });
    net.usual->running_mean.fill_(0.25);
    net.usual->eval();
    GrainStatistics statistics(net, rank);
    const auto runs = near_equal_runs(3);
    for (int64_t grain = runs[rank.index()]; grain < runs[rank.index() + 1]; ++grain) {
      net.quick->train(grain != 4);
      Tensor output;
      statistics.forward(grain, [&] { output = net.forward(grains[grain]); });
      if (grain != 4) EXPECT_TRUE(output.equal(outputs[grain])) << grain;  // there by statistics that have moved
    }
    statistics.finish(runs);
    EXPECT_TRUE(net.usual->running_mean.equal(torch::full({5}, 0.25, torch::kDouble)));
    EXPECT_EQ(net.usual->num_batches_tracked.item<int64_t>(), 0);
    EXPECT_EQ(net.quick->num_batches_tracked.item<int64_t>(), kGrains - 1);
    expect_near(net.quick->running_mean, plain.quick->running_mean, 1e-12, "quick");
    expect_near(net.quick->running_var, plain.quick->running_var, 1e-12, "quick");
  });
}

// A backward may compute forwards again, or the first attempt may have failed.
TEST(GrainStatistics, OfTheFirstForwardThatSucceedsCount) {
  const auto grains = grains_of(0, torch::kDouble);
  run(test_devices(1), [&](Rank& rank) {
    Net once = net_of(torch::kDouble), net = net_of(torch::kDouble);
    GrainStatistics of_once(once, rank), statistics(net, rank);
    const auto forward = [&](Net& module, GrainStatistics& its, int64_t number, const Tensor& x, bool fails = false) {
      its.forward(number, [&] {
        module.forward(x);
        if (fails) throw std::runtime_error("no");
      });
    };
    const auto before = buffers_of(net);
    EXPECT_THROW(forward(net, statistics, 0, grains[3], /*fails=*/true), std::runtime_error);
    expect_equal(buffers_of(net), before, "after an exception");
    for (int64_t number = 0; number < 3; ++number) {
      forward(once, of_once, number, grains[number]);
      forward(net, statistics, number, grains[number]);
    }
    forward(net, statistics, 1, grains[4]);
    EXPECT_THROW(forward(net, statistics, 2, grains[4], /*fails=*/true), std::runtime_error);
    expect_equal(buffers_of(net), before, "before finish()");
    of_once.finish({0, 3});
    statistics.finish({0, 3});
    expect_equal(buffers_of(net), buffers_of(once), "after finish()");
  });
}

TEST(GrainStatistics, OfAbandonedGrainsCountNothing) {
  const auto grains = grains_of(0, torch::kFloat);
  run(test_devices(2), [&](Rank& rank) {
    Net net = rank.in_turn([] { return net_of(torch::kFloat); });
    GrainStatistics statistics(net, rank);
    const auto before = buffers_of(net);
    statistics.forward(rank.index(), [&] { net.forward(grains[1]); });
    statistics.abandon();
    statistics.finish({0, 1, 2});
    expect_equal(buffers_of(net), before, "after finish()");
    statistics.finish({5, 5, 5});
  });
}

// Autograd has noted the buffers. A backward comes after the forward of later grains, or after finish().
TEST(GrainStatistics, LeaveGradientsAsTheyAre) {
  const auto grains = grains_of(0, torch::kDouble);
  Net plain = net_of(torch::kDouble);
  plain.eval();
  plain.usual->train();
  for (const auto& grain : grains) plain.forward(grain).backward();
  run(test_devices(1), [&](Rank& rank) {
    Net net = net_of(torch::kDouble);
    GrainStatistics statistics(net, rank);
    net.eval();
    net.usual->train();
    std::vector<Tensor> losses;
    for (int64_t number = 0; number < kGrains; ++number) {
      statistics.forward(number, [&] { losses.push_back(net.forward(grains[number])); });
    }
    for (int64_t number = 0; number < 4; ++number) losses[number].backward();
    statistics.finish({0, kGrains});
    for (int64_t number = 4; number < kGrains; ++number) losses[number].backward();
    for (size_t i = 0; i < net.parameters().size(); ++i) {
      expect_near(net.parameters()[i].grad(), plain.parameters()[i].grad(), 0, std::to_string(i));
    }
    expect_near(net.usual->running_var, plain.usual->running_var, 1e-12, "usual");
  });
}

TEST(GrainStatistics, OfNothingNeedNoExchange) {
  run(test_devices(2), [](Rank& rank) {
    const auto calls = std::make_shared<CountingBackend::Calls>();
    Rank counting = counted(rank, calls);
    nn::Sequential linear(nn::Linear(2, 2), nn::BatchNorm1d(nn::BatchNormOptions(2).track_running_stats(false)));
    GrainStatistics none(*linear, counting);
    none.forward(rank.index(), [&] { linear->forward(torch::ones({2, 2})); });
    none.finish({0, 1, 2});
    EXPECT_TRUE(calls->empty());
    nn::BatchNorm1d norm(2);
    GrainStatistics one(*norm, counting);
    one.finish({0, 1, 2});
    EXPECT_EQ(*calls, CountingBackend::Calls{"allgather"});
  });
}

TEST(GrainStatistics, RefuseWhatTheyDoNotKnow) {
  struct Own : nn::Module {
    Own() {
      register_buffer("running_mean", torch::zeros({2}));
      register_buffer("running_var", torch::ones({2}));
    }
  };
  struct With : nn::Module {
    With() { register_module("own", std::make_shared<Own>()); }
  };
  EXPECT_THAT(error_on_ranks(1, [](Rank& rank) { GrainStatistics(With(), rank); }), Refused());
}

TEST(GrainStatistics, RefuseGrainsOfOthers) {
  const auto computed = [](const std::vector<int64_t>& runs) {
    return error_on_ranks(2, [&](Rank& rank) {
      nn::BatchNorm1d norm(2);
      GrainStatistics statistics(*norm, rank);
      for (const int64_t number : {2 * rank.index(), 2 * rank.index() + 1}) {
        statistics.forward(number, [&] { norm(torch::ones({2, 2})); });
      }
      statistics.finish(runs);
    });
  };
  EXPECT_EQ(computed({0, 2, 4}), "(no error)");
  EXPECT_THAT(computed({0, 1, 4}), Refused());
  EXPECT_THAT(computed({0, 4}), Refused());
  EXPECT_THAT(computed({0, 4, 2}), Refused());
  EXPECT_THAT(error_on_ranks(1,
                             [](Rank& rank) {
                               nn::BatchNorm1d norm(2);
                               GrainStatistics statistics(*norm, rank);
                               statistics.forward(0, [&] { statistics.forward(1, [] {}); });
                             }),
              Refused());
}

}  // namespace grain_statistics_test
