// Labels: concurrency
// LibTorch's generator, which all ranks of a process share: a rank that seeds it, and layers that draw from it, are
// warned of.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/nn/dropout.hpp>
#include <lockstep/pipeline/pipeline.hpp>
#include <lockstep/server/parameter_server.hpp>

#include "ranks/rank_generators.hpp"
#include "support/test_devices.hpp"

#include <functional>
#include <memory>
#include <string>

namespace lockstep {
namespace shared_generator_test {

using testing::AllOf;
using testing::HasSubstr;
using torch::Tensor;
using torch::nn::AnyModule;
using torch::nn::Sequential;
namespace F = torch::nn::functional;

std::string warnings_in(int ranks, const std::function<void(Rank&)>& body) {
  std::string texts;
  run(test_devices(ranks), body, {.on_warning = [&](const std::string& text) { texts += text + "\n"; }});
  return texts;
}

TEST(SharedGenerator, WarnsOfASeedThatARankSetsForAll) {
  const auto make = [](Rank& rank) { DataParallel(torch::nn::Linear(1, 1), rank); };
  const auto seeded = [&](Rank& rank) {
    if (rank.index() == 1) torch::manual_seed(1234);
    rank.barrier();
    make(rank);
    make(rank);
  };
  torch::manual_seed(1);
  EXPECT_THAT(warnings_in(2, seeded), AllOf(HasSubstr("torch::manual_seed was called by a rank"),
                                            HasSubstr("Rank::in_turn()"), HasSubstr("Rank::generator()")));
  EXPECT_EQ(warnings_in(2, make), "");
  EXPECT_EQ(warnings_in(2,
                        [&](Rank& rank) {
                          rank.in_turn([] { return torch::manual_seed(99), 0; });
                          make(rank);
                        }),
            "");
  EXPECT_EQ(warnings_in(1,
                        [&](Rank& rank) {
                          torch::manual_seed(3);
                          make(rank);
                        }),
            "");
}

// In the middle of a training.
TEST(SharedGenerator, WarnsOfASeedInTheLoop) {
  const Batch batch{torch::ones({4, 3}), torch::zeros({4}, torch::kLong), 4};
  const Batch part{torch::ones({2, 3}), torch::zeros({2}, torch::kLong), 4};
  const auto net_of = [](Rank& rank) {
    return rank.in_turn([] { return Sequential(torch::nn::Linear(3, 3), torch::nn::Linear(3, 3)); });
  };
  const auto by_data = [&](Rank& rank, const auto& before_step) {
    DataParallel net(net_of(rank), rank);
    before_step();
    net.loss(part, F::cross_entropy).backward();
  };
  const auto by_layers = [&](Rank& rank, const auto& before_step) {
    Pipeline pipeline(split_into_stages(net_of(rank), 2), rank);
    before_step();
    pipeline.forward_backward(batch, F::cross_entropy);
  };
  const auto served = [&](Rank& rank, const auto& before_step) {
    const auto make_sgd = [](const auto& pieces) { return std::make_unique<torch::optim::SGD>(pieces, 0.1); };
    ParameterServer server(net_of(rank), rank, make_sgd);
    before_step();
    server.train([](Worker& worker) { worker.step(); });
  };
  const auto warnings = [](const auto& trained, bool seeded) {
    return warnings_in(2, [&](Rank& rank) {
      trained(rank, [&] {
        rank.barrier();
        if (seeded && rank.index() == 1) torch::manual_seed(1234);
        rank.barrier();
      });
    });
  };
  const auto expect_warned_if_seeded = [&](const auto& trained) {
    EXPECT_THAT(warnings(trained, true), HasSubstr("torch::manual_seed was called by a rank"));
    EXPECT_EQ(warnings(trained, false), "");
    torch::manual_seed(1);
  };
  expect_warned_if_seeded(by_data);
  expect_warned_if_seeded(by_layers);
  expect_warned_if_seeded(served);
}

// A checkpoint's state has the seed of its run.
TEST(SharedGenerator, DoesNotWarnOfAStateThatARunGoesOnFrom) {
  Tensor states;
  torch::manual_seed(5);
  run(test_devices(2), [&](Rank& rank) {
    const Tensor here = generators_of_all_ranks(rank);
    if (rank.index() == 0) states = here;
  });
  torch::manual_seed(6);
  EXPECT_EQ(warnings_in(2,
                        [&](Rank& rank) {
                          set_generator(rank, states);
                          DataParallel(torch::nn::Linear(1, 1), rank);
                        }),
            "");
}

TEST(SharedGenerator, WarnsOfLayersThatDrawFromIt) {
  const auto make = [](auto layer) {
    return [layer](Rank& rank) { DataParallel(Sequential({{"drop", layer}}), rank); };
  };
  const auto in_a_pipeline = [](Rank& rank) {
    Pipeline(split_into_stages(Sequential({{"linear", AnyModule(torch::nn::Linear(2, 2))},
                                           {"drop", AnyModule(torch::nn::Dropout(0.5))}}),
                               2),
             rank);
  };
  EXPECT_THAT(warnings_in(2, in_a_pipeline),
              AllOf(HasSubstr("rank 1 (cpu): Pipeline: drop draws"), HasSubstr("lockstep::Dropout")));
  EXPECT_THAT(warnings_in(2, make(torch::nn::Dropout(0.5))),
              AllOf(HasSubstr("drop draws"), HasSubstr("lockstep::Dropout")));
  EXPECT_EQ(warnings_in(1, make(torch::nn::Dropout(0.5))), "");
  EXPECT_EQ(warnings_in(2, make(Dropout(0.5))), "");
}

}  // namespace shared_generator_test
}  // namespace lockstep
