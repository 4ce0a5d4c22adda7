// Mistakes that a user of DataParallel could make in silence elsewhere. Here each is refused at once, with what to do.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>

#include "support/error_of.hpp"
#include "support/group_tests.hpp"
#include "support/test_devices.hpp"

#include <cmath>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace data_parallel_misuse_test {

using lockstep::Batch;
using lockstep::DataParallel;
using lockstep::Error;
using lockstep::errors_on_ranks;
using lockstep::Fails;
using lockstep::Optimizer;
using lockstep::Rank;
using lockstep::Refused;
using lockstep::Sharded;
using testing::Each;
using torch::Tensor;
namespace F = torch::nn::functional;

const lockstep::Dataset data{torch::rand({12, 6}), torch::arange(12) % 3};

Batch part_of_batch(const Rank& rank) {
  return {data.x.slice(0, rank.index(), rank.index() + 1), data.y.slice(0, rank.index(), rank.index() + 1),
          rank.world_size()};
}

// Two batches of one sample each, of the rank's part of two samples.
std::vector<Batch> halves_of_part(const Rank& rank) {
  const int begin = 2 * rank.index();
  const Batch part{data.x.slice(0, begin, begin + 2), data.y.slice(0, begin, begin + 2), 2 * rank.world_size()};
  return part.in_parts(2);
}

const torch::optim::SGDOptions kSgd(0.1);

lockstep::DataParallelOptions options_of(bool sharded) {
  return {.sharded = sharded ? Sharded::state : Sharded::nothing};
}

TEST(DataParallelMisuse, BatchesThatWereNotSplitAreRefusedOnAllRanks) {
  for (const bool sharded : {false, true}) {
    const auto errors = errors_on_ranks(2, [&](Rank& rank) {
      DataParallel net(torch::nn::Linear(6, 3), rank, options_of(sharded));
      const Optimizer optimizer(net, kSgd);
      for (auto& batch : lockstep::batches(data, {.size = 4})) net.loss(batch, F::cross_entropy).backward();
    });
    EXPECT_THAT(errors, Each(Fails(Error::difference)));
  }
}

// A rank of a pipeline, say, whose stage has one replica: its part of all ranks' batch is half of the right one.
TEST(DataParallelMisuse, PartsForMoreRanksThanAverageAreRefused) {
  const auto errors = errors_on_ranks(2, [](Rank& rank) {
    Rank alone = rank.group(rank.index());
    DataParallel net(torch::nn::Linear(6, 3), alone);
    for (auto& batch : lockstep::batches(data, {.size = 4}, rank)) net.loss(batch, F::cross_entropy).backward();
  });
  EXPECT_THAT(errors, Each(Fails(Error::difference)));
}

TEST(DataParallelMisuse, OtherBatchSizesAreRefusedOnAllRanks) {
  const auto errors = errors_on_ranks(3, [](Rank& rank) {
    DataParallel net(torch::nn::Linear(6, 3), rank);
    for (auto& batch : lockstep::batches(data, {.size = 4 + rank.index()}, rank)) {
      net.loss(batch, F::cross_entropy).backward();
    }
  });
  EXPECT_THAT(errors, Each(Fails(Error::difference)));
}

// Tokens that the user counts, in batches of more than 32 bits can count.
TEST(DataParallelMisuse, PartsOfBillionsAreCountedExactly) {
  const auto errors_with = [](const std::vector<int64_t>& sizes, const std::vector<int64_t>& globals) {
    return errors_on_ranks(2, [&](Rank& rank) {
      DataParallel net(torch::nn::Linear(6, 3), rank);
      const auto place = static_cast<size_t>(rank.index());
      net.mean(net(data.x).mean(), sizes[place], globals[place]).backward();
    });
  };
  const int64_t billion = 1000000000, wrapped = int64_t{1} << 32;
  EXPECT_THAT(errors_with({3 * billion, 3 * billion}, {6 * billion, 6 * billion}), Each("(no error)"));
  EXPECT_THAT(errors_with({2, 2}, {4 + wrapped, 4}), Each(Fails(Error::difference)));
  EXPECT_THAT(errors_with({2, 2}, {4 + wrapped, 4 + wrapped}), Each(Fails(Error::difference)));
}

TEST(DataParallelMisuse, BatchesInAnotherOrderAreRefusedOnAllRanks) {
  const std::vector<std::pair<std::string, std::function<void(lockstep::BatchOptions&)>>> others = {
      {"seed", [](auto& options) { options.seed = 1; }},
      {"epoch", [](auto& options) { options.epoch = 1; }},
      {"shuffle", [](auto& options) { options.shuffle = false; }}};
  for (const int world : {2, 3}) {
    for (const auto& [what, change] : others) {
      const auto errors = errors_on_ranks(world, [&, &change = change](Rank& rank) {
        DataParallel net(torch::nn::Linear(6, 3), rank, options_of(world == 3));
        const Optimizer optimizer(net, kSgd);
        lockstep::BatchOptions options{.size = 4};
        if (rank.index() == 1) change(options);
        for (auto& batch : lockstep::batches(data, options, rank)) net.loss(batch, F::cross_entropy).backward();
      });
      EXPECT_THAT(errors, Each(Fails(Error::difference, {1}))) << world << what;
    }
  }
}

// No argument says of which batch a backward is.
TEST(DataParallelMisuse, BackwardsThatDoNotGetTheBatchKnowItAllTheSame) {
  using Net = DataParallel<torch::nn::LinearImpl>;
  const auto through = [](Net& net, const Batch& batch) {
    net.backward_through([&] { F::cross_entropy(net(batch.x), batch.y).backward(); });
  };
  const auto mean = [](Net& net, const Batch& batch) {
    net.mean(F::cross_entropy(net(batch.x), batch.y), batch.size(), batch.global_size).backward();
  };
  for (const std::function<void(Net&, const Batch&)>& backward :
       {std::function<void(Net&, const Batch&)>(through), {mean}}) {
    for (const bool differ : {true, false}) {
      const auto errors = errors_on_ranks(2, [&](Rank& rank) {
        Net net(torch::nn::Linear(6, 3), rank);
        const uint64_t seed = differ && rank.index() == 1 ? 1 : 0;
        for (auto& batch : lockstep::batches(data, {.size = 4, .seed = seed}, rank)) {
          // A batch that a rank looks at by itself, and that is not cut for all ranks, does not count.
          auto all = lockstep::batches(data, {.size = 4, .seed = 7});
          if (!differ && rank.index() == 1) EXPECT_EQ((*all.begin()).size(), 4);
          backward(net, batch);
        }
      });
      if (differ) {
        EXPECT_THAT(errors, Each(Fails(Error::difference)));
      } else {
        EXPECT_THAT(errors, Each("(no error)"));
      }
    }
  }
}

TEST(DataParallelMisuse, ABatchThatOneRankLeavesOutIsSeen) {
  const auto errors = errors_on_ranks(3, [](Rank& rank) {
    DataParallel net(torch::nn::Linear(6, 3), rank);
    bool first = true;
    for (auto& batch : lockstep::batches(data, {.size = 4}, rank)) {
      if (!std::exchange(first, false) || rank.index() != 2) net.loss(batch, F::cross_entropy).backward();
    }
  });
  EXPECT_THAT(errors, Each(Fails(Error::difference, {2})));
}

// Nobody knows the order of such batches.
TEST(DataParallelMisuse, BatchesOfOnesOwnGoWithTheOthers) {
  const auto errors = errors_on_ranks(3, [](Rank& rank) {
    DataParallel net(torch::nn::Linear(6, 3), rank);
    for (auto& batch : lockstep::batches(data, {.size = 6}, rank)) {
      const Batch own{batch.x, batch.y, batch.global_size};
      net.loss(rank.index() == 0 ? own : batch, F::cross_entropy).backward();
      for (const auto& part : batch.in_parts(2)) EXPECT_EQ(part.mark, batch.mark);
    }
  });
  EXPECT_THAT(errors, Each("(no error)"));
}

TEST(DataParallelMisuse, PartsOfABatchThatAddUpUnderNoSyncAreNone) {
  const auto errors = errors_on_ranks(2, [](Rank& rank) {
    DataParallel net(torch::nn::Linear(6, 3), rank);
    for (int step = 0; step < 2; ++step) {
      const Batch part = part_of_batch(rank);
      {
        const auto guard = net.no_sync();
        net.mean(F::cross_entropy(net(part.x), part.y), 1, 4).backward();
      }
      net.mean(F::cross_entropy(net(part.x), part.y), 1, 4).backward();
    }
  });
  EXPECT_THAT(errors, Each("(no error)"));
}

TEST(DataParallelMisuse, NorArePartsOfSeveralBatches) {
  const auto errors = errors_on_ranks(2, [](Rank& rank) {
    DataParallel net(torch::nn::Linear(6, 3), rank);
    const auto parts = halves_of_part(rank);
    {
      const auto guard = net.no_sync();
      for (const int part : {0, 1, 0}) net.loss(parts.at(part), F::cross_entropy).backward();
    }
    net.loss(parts.at(1), F::cross_entropy).backward();
  });
  EXPECT_THAT(errors, Each("(no error)"));
}

TEST(DataParallelMisuse, WeightsAndGradientsThatAreNotNumbersHaveNotChanged) {
  for (const int stage : {0, 1, 2}) {
    const auto errors = errors_on_ranks(2, [&](Rank& rank) {
      torch::nn::Linear module(6, 3);
      DataParallel net(module, rank, {.sharded = static_cast<Sharded>(stage)});
      Optimizer optimizer(net, kSgd);
      for (auto& parameter : module->parameters()) parameter.data().fill_(std::nan(""));
      const auto parts = halves_of_part(rank);
      {
        const auto guard = net.no_sync();
        net.loss(parts.at(0), F::cross_entropy).backward();
      }
      net.loss(parts.at(1), F::cross_entropy).backward();
      optimizer.step();
    });
    EXPECT_THAT(errors, Each("(no error)")) << stage;
  }
}

// An optimizer of one's own, of the module's own pointer, steps with what is in .grad.
TEST(DataParallelMisuse, StepsWithGradientsThatWereNotAveragedAreRefused) {
  for (const std::string how :
       {"tensor", "no_sync", "no_sync that lives on", "tensor beside stage 1", "no_sync beside stage 2"}) {
    for (const std::string then : {"loss", "backward_through"}) {
      if (how == "no_sync that lives on" && then == "backward_through") continue;
      const auto errors = errors_on_ranks(2, [&](Rank& rank) {
        torch::nn::Linear module(6, 3);
        DataParallel net(module, rank,
                         {.sharded = how.ends_with("1")   ? Sharded::state
                                     : how.ends_with("2") ? Sharded::gradients
                                                          : Sharded::nothing});
        const Optimizer optimizer(net, kSgd);
        torch::optim::SGD sgd(module->parameters(), 0.1);
        const Batch batch = part_of_batch(rank);
        std::optional<lockstep::NoSync> guard;
        if (how.starts_with("tensor")) {
          F::cross_entropy(net(batch.x), batch.y).backward();
        } else {
          guard.emplace(net.replica());
          net.loss(batch, F::cross_entropy).backward();
        }
        if (how != "no_sync that lives on") guard.reset();
        sgd.step();
        if (then == "loss") {
          net.loss(batch, F::cross_entropy).backward();
        } else {
          net.backward_through([] {});
        }
      });
      EXPECT_THAT(errors, Each(Refused())) << how << ", " << then;
    }
  }
}

// A GAN's generator has a loss that flows through the discriminator.
TEST(DataParallelMisuse, ALossOfAnotherNetMayFlowThroughThisOne) {
  const auto errors = errors_on_ranks(2, [](Rank& rank) {
    DataParallel generator(torch::nn::Linear(6, 6), rank), discriminator(torch::nn::Linear(6, 3), rank);
    torch::optim::SGD generators(generator->parameters(), 0.1), discriminators(discriminator->parameters(), 0.1);
    const Batch batch = part_of_batch(rank);
    for (int step = 0; step < 3; ++step) {
      discriminators.zero_grad();
      discriminator.mean(F::cross_entropy(discriminator(batch.x), batch.y), 1, 2).backward();
      discriminators.step();
      generators.zero_grad();
      generator.mean(F::cross_entropy(discriminator(generator(batch.x)), batch.y), 1, 2).backward();
      generators.step();
    }
  });
  EXPECT_THAT(errors, Each("(no error)"));
}

TEST(DataParallelMisuse, ALossWithoutAGraphIsRefused) {
  const auto errors = errors_on_ranks(2, [](Rank& rank) {
    DataParallel net(torch::nn::Linear(6, 3), rank);
    const Batch batch = part_of_batch(rank);
    const auto loss = [&] {
      const torch::NoGradGuard no_grad;
      return net.loss(batch, F::cross_entropy);
    };
    EXPECT_GT(loss().item(), 0);  // a loss may be looked at so
    loss().backward();
  });
  EXPECT_THAT(errors, Each(Refused()));
}

TEST(DataParallelMisuse, AnOptimizerOfOtherTensorsThanItsSlicesIsRefused) {
  const auto errors = errors_on_ranks(2, [](Rank& rank) {
    torch::nn::Linear module(6, 3);
    DataParallel net(module, rank, options_of(true));
    Optimizer(net, [&](const auto&) { return std::make_unique<torch::optim::SGD>(module->parameters(), 0.1); });
  });
  EXPECT_THAT(errors, Each(Refused()));
  for (const bool sharded : {false, true}) {
    const auto without = errors_on_ranks(2, [&](Rank& rank) {
      DataParallel net(torch::nn::Linear(100, 100), rank,
                       {.bucket_bytes = 1, .sharded = sharded ? Sharded::state : Sharded::nothing});
      Optimizer(net, [](Optimizer::Groups groups) {
        groups.front().params().pop_back();
        return std::make_unique<torch::optim::SGD>(groups, 0.1);
      });
    });
    EXPECT_THAT(without, Each(Refused()));
  }
}

TEST(DataParallelMisuse, ABatchNormOfOneSampleSaysWhatToDo) {
  const auto errors = errors_on_ranks(2, [](Rank& rank) {
    DataParallel net(torch::nn::Sequential(torch::nn::Linear(6, 3), torch::nn::BatchNorm1d(3)), rank);
    net.loss(part_of_batch(rank), F::cross_entropy).backward();
  });
  EXPECT_THAT(errors, Each(Refused()));
}

// Each is a view of its bucket, which the next backward fills.
TEST(DataParallelMisuse, AGradientThatIsKeptKeepsItsValues) {
  for (const int64_t grain : {0, 2}) {
    const auto errors = errors_on_ranks(2, [&](Rank& rank) {
      DataParallel net(torch::nn::Linear(6, 3), rank);
      std::vector<Tensor> kept, copies;
      for (auto& batch : lockstep::batches(data, {.size = 2, .grain = grain}, rank)) {
        net->zero_grad();
        net.loss(batch, F::cross_entropy).backward();
        kept.push_back(net->weight.grad());
        copies.push_back(net->weight.grad().clone());
      }
      for (size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(kept[i].equal(copies[i])) << i;
      net->zero_grad();
      net.backward_through([] {});
      EXPECT_TRUE(kept.back().equal(copies.back()));
    });
    EXPECT_THAT(errors, Each("(no error)"));
  }
}

TEST(DataParallelMisuse, ABackwardThatOneRankForgetsIsNamed) {
  for (const bool sharded : {false, true}) {
    for (const bool goes_on : {false, true}) {
      const auto error = lockstep::error_of([&] {
        lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
          DataParallel net(torch::nn::Linear(6, 3), rank, options_of(sharded));
          const Optimizer optimizer(net, kSgd);
          for (int step = 1; step <= 3; ++step) {
            auto loss = net.loss(part_of_batch(rank), F::cross_entropy);
            if (step < 3 || rank.index() == 0) loss.backward();
          }
          if (goes_on) rank.barrier();
        });
      });
      EXPECT_THAT(error, Fails(Error::difference)) << sharded << goes_on;
    }
  }
}

TEST(DataParallelMisuse, CallsThatOneRankMakesAloneAreExplained) {
  const auto error_of = [](const std::function<void(Rank&)>& body) {
    return lockstep::error_of([&] { lockstep::run(lockstep::test_devices(2), body); });
  };
  for (const bool goes_on : {false, true}) {
    EXPECT_THAT(error_of([&](Rank& rank) {
                  DataParallel net(torch::nn::Linear(6, 3), rank);
                  auto loss = net.loss(part_of_batch(rank), F::cross_entropy);
                  if (rank.index() == 0) EXPECT_GT(loss.global_item(), 0);
                  if (goes_on) loss.backward();
                }),
                Fails(Error::difference))
        << goes_on;
    EXPECT_THAT(error_of([&](Rank& rank) {
                  if (rank.index() == 0 && rank.any(true)) return;
                  if (goes_on) rank.barrier();
                }),
                Fails(Error::difference))
        << goes_on;
  }
  EXPECT_THAT(error_of([](Rank& rank) { rank.in_turn([&] { return DataParallel(torch::nn::Linear(6, 3), rank); }); }),
              Fails(Error::difference));
}

// ---- What LibTorch refuses without a name.

struct Scaled : torch::nn::Module {
  explicit Scaled(const Tensor& factors = torch::ones({1})) : factor(register_buffer("factor", factors)) {}
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(6, 3));
  Tensor factor, plain = torch::ones({1});
  Tensor forward(const Tensor& x) { return linear(x) * factor * plain; }
};

TEST(DataParallelMisuse, ABufferWithAGraphIsRefused) {
  EXPECT_THAT(errors_on_ranks(2,
                              [](Rank& rank) {
                                torch::nn::Linear net(6, 3);
                                net->register_buffer("norm", net->weight.norm());
                                const DataParallel made(net, rank);
                              }),
              Each(Refused()));
}

TEST(DataParallelMisuse, AGraphOfAnEarlierStepIsNamed) {
  for (const bool in_buffer : {false, true}) {
    const auto errors = errors_on_ranks(2, [&](Rank& rank) {
      DataParallel net(std::make_shared<Scaled>(), rank);
      (in_buffer ? net->factor : net->plain) *= net->linear->weight.square().mean();
      for (int step = 0; step < 2; ++step) net.loss(part_of_batch(rank), F::cross_entropy).backward();
    });
    EXPECT_THAT(errors, Each(Refused()));
  }
}

Tensor inferred(const Tensor& tensor) {
  const c10::InferenceMode inference;
  return tensor.clone();
}

TEST(DataParallelMisuse, TensorsOfInferenceModeAreNamed) {
  EXPECT_THAT(errors_on_ranks(2,
                              [](Rank& rank) {
                                const c10::InferenceMode inference;
                                torch::nn::Linear net(6, 3);
                                const c10::InferenceMode off(false);
                                const DataParallel made(net, rank);
                              }),
              Each(Refused()));
  EXPECT_THAT(
      errors_on_ranks(
          2, [](Rank& rank) { const DataParallel made(std::make_shared<Scaled>(inferred(torch::ones({1}))), rank); }),
      Each(Refused()));
  for (const int64_t grain : {0, 1}) {
    const auto errors = errors_on_ranks(2, [&](Rank& rank) {
      DataParallel net(std::make_shared<Scaled>(), rank);
      Batch batch = part_of_batch(rank);
      batch.x = inferred(batch.x);
      batch.grain = grain;
      batch.first = rank.index();
      net.loss(batch, F::cross_entropy).backward();
    });
    EXPECT_THAT(errors, Each(Refused())) << grain;
  }
}

TEST(DataParallelMisuse, ALossOfInferenceModeIsToldSo) {
  EXPECT_THAT(errors_on_ranks(2,
                              [](Rank& rank) {
                                DataParallel net(torch::nn::Linear(6, 3), rank);
                                const c10::InferenceMode inference;
                                net.loss(part_of_batch(rank), F::cross_entropy).backward();
                              }),
              Each(Refused()));
}

}  // namespace data_parallel_misuse_test
