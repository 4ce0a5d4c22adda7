// Labels: concurrency
// LibTorch's generator, which all ranks of a process share: a rank that seeds the generator, and layers that draw from
// it, are warned of.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/nn/dropout.hpp>

#include "ranks/shared_generator.hpp"
#include "support/seed_warnings.hpp"
#include "support/test_devices.hpp"

namespace lockstep {
namespace shared_generator_test {

using testing::AllOf;
using testing::HasSubstr;
using torch::Tensor;
using torch::nn::Sequential;
namespace F = torch::nn::functional;

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

TEST(SharedGenerator, WarnsOfASeedInTheLoop) {
  const Batch part{torch::ones({2, 3}), torch::zeros({2}, torch::kLong), 4};
  expect_warned_of_a_seed_in_the_loop([&](Rank& rank, const Sequential& module, const auto& before_step) {
    DataParallel net(module, rank);
    before_step();
    net.loss(part, F::cross_entropy).backward();
  });
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
  EXPECT_THAT(warnings_in(2, make(torch::nn::Dropout(0.5))),
              AllOf(HasSubstr("drop draws"), HasSubstr("lockstep::Dropout")));
  EXPECT_EQ(warnings_in(1, make(torch::nn::Dropout(0.5))), "");
  EXPECT_EQ(warnings_in(2, make(Dropout(0.5))), "");
}

}  // namespace shared_generator_test
}  // namespace lockstep
