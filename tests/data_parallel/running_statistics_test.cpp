// Labels: concurrency arithmetic
// average_running_statistics over 1 to 4 CPU ranks.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/check_replicas.hpp>
#include <lockstep/data_parallel/running_statistics.hpp>

#include "data_parallel/grain_statistics.hpp"
#include "support/group_tests.hpp"

#include <memory>

namespace lockstep {
namespace running_statistics_test {

namespace nn = torch::nn;

// A module with a buffer of its own.
struct Net : nn::Module {
  nn::BatchNorm1d norm = register_module("norm", nn::BatchNorm1d(3));
  nn::Sequential layers = register_module("layers", nn::Sequential(nn::BatchNorm2d(2), nn::ReLU()));
  torch::Tensor table = register_buffer("table", torch::zeros({2}));
};

TEST(RunningStatistics, AreTheMeanWeightedBySamples) {
  for (const int ranks : {1, 2, 3, 4}) {
    run(test_devices(ranks), [](Rank& rank) {
      Net net;
      net.norm->running_mean.fill_(rank.index() + 1);
      net.layers->ptr(0)->named_buffers()["running_var"].fill_(10 * rank.index());
      net.norm->num_batches_tracked.fill_(5 - rank.index());
      net.table.fill_(rank.index());
      average_running_statistics(net, rank, /*samples=*/rank.index());  // the first rank has had none
      double samples = 0, mean = 0, variance = 0;
      for (int i = 0; i < rank.world_size(); ++i) {
        samples += i;
        mean += i * (i + 1);
        variance += i * 10 * i;
      }
      const bool none = rank.world_size() == 1;
      const auto names = net.named_buffers();
      EXPECT_TRUE(names["norm.running_mean"].allclose(torch::full({3}, none ? 1 : mean / samples)));
      EXPECT_TRUE(names["layers.0.running_var"].allclose(torch::full({2}, none ? 0 : variance / samples)));
      EXPECT_TRUE(names["norm.running_var"].equal(torch::ones({3})));
      EXPECT_EQ(net.norm->num_batches_tracked.item<int64_t>(), 5);
      EXPECT_TRUE(net.table.equal(torch::full({2}, static_cast<float>(rank.index()))));
      for (const auto& item : names) {
        if (item.key() != "table") expect_equal_on_all_ranks(item.value(), rank, item.key());
      }
    });
  }
}

TEST(RunningStatistics, ThatAreEqualKeepTheirBits) {
  torch::manual_seed(1);
  const torch::Tensor values = torch::randn({1000}) / 3;
  run(test_devices(3), [&](Rank& rank) {
    nn::BatchNorm1d norm(1000);
    norm->running_mean.copy_(values);
    average_running_statistics(*norm, rank, 17 + 4 * rank.index());
    EXPECT_TRUE(norm->running_mean.equal(values));
  });
}

// It has no running_var, and the buffer is a running statistic all the same.
struct Centred : nn::Module {
  torch::Tensor mean = register_buffer("running_mean", torch::zeros({3}));
  torch::Tensor forward(const torch::Tensor& x) { return x - mean; }
};

TEST(RunningStatistics, OfALayerThatNobodyKnowsAreAveragedAndRefusedByGrains) {
  run(test_devices(3), [](Rank& rank) {
    nn::Sequential net{Centred()};
    const torch::Tensor mean = net->buffers()[0];
    mean.fill_(rank.index());
    check_replicas(*net, rank);  // each rank's follows its own samples
    EXPECT_THAT(error_of([&] { GrainStatistics(*net, rank); }), Refused());
    average_running_statistics(*net, rank, 1);
    EXPECT_TRUE(mean.equal(torch::ones({3})));
  });
}

TEST(RunningStatistics, OfNothingNeedNoExchange) {
  run(test_devices(2), [](Rank& rank) {
    const auto calls = std::make_shared<CountingBackend::Calls>();
    Rank counting = counted(rank, calls);
    nn::Sequential net(nn::Linear(2, 2));
    average_running_statistics(*net, counting, 1);
    EXPECT_TRUE(calls->empty());
  });
  EXPECT_THAT(error_on_ranks(1, [](Rank& rank) { average_running_statistics(*nn::BatchNorm1d(2), rank, -1); }),
              Refused());
}

}  // namespace running_statistics_test
}  // namespace lockstep
