// Labels: concurrency
// DataParallel refuses modules that are not alike on all ranks, or that change later.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>

#include "support/error_of.hpp"
#include "support/group_tests.hpp"

namespace unlike_modules_test {

using lockstep::Batch;
using lockstep::DataParallel;
using lockstep::Error;
using lockstep::error_on_ranks;
using lockstep::errors_on_ranks;
using lockstep::Fails;
using lockstep::Optimizer;
using lockstep::Rank;
using lockstep::Refused;
using lockstep::Sharded;
using testing::Each;
using torch::Tensor;
namespace F = torch::nn::functional;

Batch part_of_batch(const Rank& rank) {
  return {torch::full({1, 6}, 1.0 * rank.index()), torch::full({1}, rank.index() % 3), rank.world_size()};
}

TEST(UnlikeModules, ShapesThatDifferAreRefusedOnEveryRank) {
  EXPECT_THAT(error_on_ranks(2, [](Rank& rank) { DataParallel net(torch::nn::Linear(2, 3 + rank.index()), rank); }),
              Fails(Error::difference));
  EXPECT_THAT(error_on_ranks(2,
                             [](Rank& rank) {
                               const auto options = torch::nn::LinearOptions(2, 3).bias(rank.index() == 0);
                               DataParallel net(torch::nn::Linear(options), rank);
                             }),
              Fails(Error::difference));
}

TEST(UnlikeModules, ReplicasThatShareTheirMemoryAreRefused) {
  const torch::nn::LinearImpl prototype(2, 3);  // copies share its tensors
  EXPECT_THAT(error_on_ranks(3, [&](Rank& rank) { DataParallel net(torch::nn::LinearImpl(prototype), rank); }),
              Fails(Error::difference));
}

TEST(UnlikeModules, ReplicasThatShareOneBufferAreRefused) {
  struct WithBuffer : torch::nn::Module {
    explicit WithBuffer(const Tensor& buffer) { register_buffer("buffer", buffer); }
    Tensor forward(const Tensor& x) { return linear(x); }
    torch::nn::Linear linear = register_module("linear", torch::nn::Linear(2, 2));
  };
  const Tensor shared = torch::zeros({2});
  EXPECT_THAT(
      error_on_ranks(
          3, [&](Rank& rank) { DataParallel net(WithBuffer(rank.index() == 1 ? torch::zeros({2}) : shared), rank); }),
      Fails(Error::difference));
}

TEST(UnlikeModules, ParametersThatLieOtherwiseInMemoryAreRefusedOnAllRanks) {
  EXPECT_THAT(errors_on_ranks(2,
                              [](Rank& rank) {
                                torch::nn::Conv2d conv(2, 2, 3);
                                if (rank.index() == 1) {
                                  const Tensor here = conv->weight.detach();
                                  conv->weight.set_data(here.contiguous(torch::MemoryFormat::ChannelsLast));
                                }
                                const DataParallel net(conv, rank);
                              }),
              Each(Fails(Error::difference, {0, 1})));
}

TEST(UnlikeModules, EqualShapesUnderOtherNamesAreRefused) {
  const auto errors = errors_on_ranks(3, [](Rank& rank) {
    torch::nn::Sequential net;
    net->push_back(rank.index() == 2 ? "b" : "a", torch::nn::Linear(6, 6));
    net->push_back(rank.index() == 2 ? "a" : "b", torch::nn::Linear(6, 6));
    DataParallel replicas(net, rank);
  });
  EXPECT_THAT(errors, Each(Fails(Error::difference)));
}

TEST(UnlikeModules, AParameterThatOneRankHasFrozenIsNamed) {
  const auto errors = errors_on_ranks(2, [](Rank& rank) {
    torch::nn::Linear layer(6, 3);
    layer->weight.requires_grad_(rank.index() == 0);
    const DataParallel net(layer, rank);
  });
  EXPECT_THAT(errors, Each(Fails(Error::difference)));
}

struct GrowingImpl : torch::nn::Module {
  torch::nn::Linear first = register_module("first", torch::nn::Linear(6, 3));
  torch::nn::Linear second = nullptr;
  Tensor forward(const Tensor& x) { return second ? second(first(x)) : first(x); }
};
TORCH_MODULE(Growing);

TEST(UnlikeModules, ALayerThatIsRegisteredLaterIsRefused) {
  for (const bool sharded : {false, true}) {
    const auto errors = errors_on_ranks(2, [&](Rank& rank) {
      Growing module;
      DataParallel net(module, rank, {.sharded = sharded ? Sharded::state : Sharded::nothing});
      const Optimizer optimizer(net, torch::optim::SGDOptions(0.1));
      for (int step = 0; step < 3; ++step) net.loss(part_of_batch(rank), F::cross_entropy).backward();
      module->second = module->register_module("second", torch::nn::Linear(3, 3));
      net.loss(part_of_batch(rank), F::cross_entropy).backward();
    });
    EXPECT_THAT(errors, Each(Refused()));
  }
}

// A single rank's gradients are right all the same, but for a grain's, which have the weight of its samples.
TEST(UnlikeModules, ALayerThatASingleRankRegistersLaterIsRefusedInItsFirstStepsAndByGrains) {
  const auto error_after = [](int steps, int64_t grain) {
    return error_on_ranks(1, [&](Rank& rank) {
      Growing module;
      DataParallel net(module, rank);
      const lockstep::Dataset data{torch::ones({8, 6}), torch::zeros({8}, torch::kLong)};
      const Batch batch = *lockstep::batches(data.to(rank.device()), {.size = 8, .grain = grain}, rank).begin();
      for (int step = 0; step < steps; ++step) net.loss(batch, F::cross_entropy).backward();
      module->second = module->register_module("second", torch::nn::Linear(3, 3));
      net.loss(batch, F::cross_entropy).backward();
    });
  };
  EXPECT_THAT(error_after(1, 0), Refused());
  EXPECT_EQ(error_after(4, 0), "(no error)");
  EXPECT_THAT(error_after(4, 2), Refused());
}

TEST(UnlikeModules, ALayerThatIsReplacedLaterIsRefused) {
  const auto errors = errors_on_ranks(2, [](Rank& rank) {
    DataParallel net(Growing(), rank);
    net->first = net->replace_module("first", torch::nn::Linear(6, 3));
    net.loss(part_of_batch(rank), F::cross_entropy).backward();
  });
  EXPECT_THAT(errors, Each(Refused()));
}

TEST(UnlikeModules, ANetThatGetsAnotherTypeLaterIsRefused) {
  for (const bool sharded : {false, true}) {
    const auto errors = errors_on_ranks(2, [&](Rank& rank) {
      torch::nn::Linear module(6, 3);
      DataParallel net(module, rank, {.sharded = sharded ? Sharded::state : Sharded::nothing});
      const Optimizer optimizer(net, torch::optim::SGDOptions(0.1));
      module->to(torch::kDouble);
      net.backward_through([] {});
    });
    EXPECT_THAT(errors, Each(Refused()));
  }
}

TEST(UnlikeModules, ANetThatGetsAnotherTypeLaterIsRefusedByGrainsOnASingleRankToo) {
  const auto error = error_on_ranks(1, [](Rank& rank) {
    torch::nn::Linear module(6, 3);
    DataParallel net(module, rank);
    module->to(torch::kDouble);
    const lockstep::Dataset data{torch::ones({8, 6}, torch::kDouble), torch::zeros({8}, torch::kLong)};
    const Batch batch = *lockstep::batches(data.to(rank.device()), {.size = 8, .grain = 2}, rank).begin();
    net.loss(batch, F::cross_entropy).backward();
  });
  EXPECT_THAT(error, Refused());
}

}  // namespace unlike_modules_test
