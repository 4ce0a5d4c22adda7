// Labels: concurrency
// With a grain, what would make bits depend on the number of ranks is refused, by a text that says what to do.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/data_parallel/sync_batch_norm.hpp>

#include "support/error_of.hpp"
#include "support/group_tests.hpp"
#include "support/hook_tests.hpp"
#include "support/idle_check.hpp"
#include "support/random_training.hpp"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace grain_refusals_test {

using lockstep::Batch;
using lockstep::batch_of;
using lockstep::DataParallel;
using lockstep::error_on_ranks;
using lockstep::NoSync;
using lockstep::random_samples;
using lockstep::Rank;
using lockstep::Refused;
using lockstep::Sharded;
namespace F = torch::nn::functional;

TEST(GrainRefusalsTest, OfBatches) {
  const auto error = [](int64_t grain) {
    return lockstep::error_of([&] { lockstep::batches(random_samples(1, 8), {.size = 8, .grain = grain}); });
  };
  EXPECT_THAT(error(-1), Refused());
  EXPECT_THAT(error(9), Refused());
}

TEST(GrainRefusalsTest, OfWhatDependsOnTheRanks) {
  const auto training = [](auto module, const lockstep::DataParallelOptions& options) {
    return [module, options](Rank& rank) {
      DataParallel net(module(rank), rank, options);
      net.loss(batch_of(rank, 8, 2), F::cross_entropy).backward();
    };
  };
  const auto plain = [](Rank&) { return torch::nn::Linear(4, 3); };
  const auto sequential = [](auto make) {
    return [make](Rank& rank) { return torch::nn::Sequential(torch::nn::Linear(4, 3), make(rank)); };
  };
  EXPECT_THAT(error_on_ranks(2, training(plain, {.average = false})), Refused());
  EXPECT_THAT(
      error_on_ranks(2, [&](Rank& rank) { training(plain, {.hook = std::make_shared<lockstep::PlainHook>()})(rank); }),
      Refused());
  EXPECT_THAT(error_on_ranks(2, training(sequential([](Rank&) { return torch::nn::Dropout(0.5); }), {})), Refused());
  EXPECT_THAT(error_on_ranks(2, training(sequential([](Rank& rank) { return lockstep::SyncBatchNorm(3, rank); }), {})),
              Refused());
  EXPECT_THAT(lockstep::error_of(
                  [&] { lockstep::run(lockstep::test_devices(2), training(plain, {}), {.threads_per_rank = 2}); }),
              Refused());
}

TEST(GrainRefusalsTest, OfBatchesThatAddUp) {
  EXPECT_THAT(error_on_ranks(2,
                             [](Rank& rank) {
                               DataParallel net(torch::nn::Linear(4, 3), rank);
                               const auto guard = net.no_sync();
                               const Batch batch = batch_of(rank, 8, 2);
                               net.loss(batch, F::cross_entropy).backward();
                               net.loss(batch, F::cross_entropy).backward();
                             }),
              Refused());
}

TEST(GrainRefusalsTest, OfPartsThatAreNoGrains) {
  EXPECT_THAT(error_on_ranks(2,
                             [](Rank& rank) {
                               DataParallel net(torch::nn::Linear(4, 3), rank);
                               Batch batch = batch_of(rank, 8, 2);
                               batch.x = batch.x.slice(0, 0, 3);
                               batch.y = batch.y.slice(0, 0, 3);
                               net.loss(batch, F::cross_entropy).backward();
                             }),
              Refused());
}

TEST(GrainRefusalsTest, OfPartsWithAndWithoutGrains) {
  EXPECT_THAT(error_on_ranks(2,
                             [](Rank& rank) {
                               DataParallel net(torch::nn::Linear(4, 3), rank);
                               Batch batch = batch_of(rank, 8, 2);
                               const auto parts = batch.in_parts(2);
                               {
                                 const auto guard = net.no_sync();
                                 net.loss(parts[0], F::cross_entropy).backward();
                               }
                               Batch plain = parts[1];
                               plain.grain = 0;
                               net.loss(plain, F::cross_entropy).backward();
                             }),
              Refused());
}

// Gradients that were computed without a grain would be added on each rank by itself.
TEST(GrainRefusalsTest, OfGradientsFromOutside) {
  const auto plain_part_first = [](Rank& rank) {
    DataParallel net(torch::nn::Linear(4, 3), rank);
    const auto parts = batch_of(rank, 8, 2).in_parts(2);
    Batch plain = parts[0];
    plain.grain = 0;
    {
      const auto guard = net.no_sync();
      net.loss(plain, F::cross_entropy).backward();
    }
    net.loss(parts[1], F::cross_entropy).backward();
  };
  const auto penalty_first = [](bool forgets) {
    return [forgets](Rank& rank) {
      torch::nn::Linear module(4, 3);
      DataParallel net(module, rank);
      module->weight.square().sum().backward();
      if (forgets) net->zero_grad(/*set_to_none=*/false);
      net.loss(batch_of(rank, 8, 2), F::cross_entropy).backward();
    };
  };
  const auto penalty_between = [](Rank& rank) {
    torch::nn::Linear module(4, 3);
    DataParallel net(module, rank);
    const auto parts = batch_of(rank, 8, 2).in_parts(2);
    {
      const auto guard = net.no_sync();
      net.loss(parts[0], F::cross_entropy).backward();
    }
    module->weight.square().sum().backward();
    net.loss(parts[1], F::cross_entropy).backward();
  };
  for (const int ranks : {1, 2}) {
    EXPECT_THAT(error_on_ranks(ranks, plain_part_first), Refused());
    EXPECT_THAT(error_on_ranks(ranks, penalty_first(false)), Refused());
    EXPECT_EQ(error_on_ranks(ranks, penalty_first(true)), "(no error)");
    EXPECT_THAT(error_on_ranks(ranks, penalty_between), Refused());
  }
}

// Its bits would depend on the number of ranks, and nobody would know.
TEST(GrainRefusalsTest, OfLossesThatAreNotComputedByGrains) {
  const auto by = [](int64_t grain, auto backward) {
    return error_on_ranks(2, [=](Rank& rank) {
      DataParallel net(torch::nn::Linear(4, 3), rank);
      for (auto& batch : lockstep::batches(random_samples(1, 10), {.size = 10, .grain = grain}, rank))
        backward(net, batch);
    });
  };
  const auto mean = [](auto& net, const Batch& batch) {
    net.mean(F::cross_entropy(net(batch.x), batch.y), batch.size(), batch.global_size).backward();
  };
  const auto of_a_batch_of_ones_own = [](auto& net, const Batch& batch) {
    net.loss(Batch{batch.x * 0.5, batch.y, batch.global_size}, F::cross_entropy).backward();
  };
  const auto in_parts = [](auto& net, const Batch& batch) {
    const auto parts = batch.in_parts(2);
    for (size_t part = 0; part < parts.size(); ++part) {
      std::optional<NoSync> more;
      if (part + 1 < parts.size()) more.emplace(net.replica());
      net.mean(F::cross_entropy(net(parts[part].x), parts[part].y), parts[part].size(), batch.global_size).backward();
    }
  };
  const auto through = [](auto& net, const Batch& batch) {
    net.backward_through(
        [&] { (F::cross_entropy(net(batch.x), batch.y) * net.weight_of(batch.size(), batch.global_size)).backward(); });
  };
  const auto check = [&](auto backward, const char* name) {
    EXPECT_THAT(by(4, backward), Refused()) << name;
    EXPECT_EQ(by(0, backward), "(no error)") << name;
  };
  check(mean, "mean");
  check(of_a_batch_of_ones_own, "of a batch of one's own");
  check(in_parts, "in parts");
  check(through, "through");
}

TEST(GrainRefusalsTest, OfAveragesOfBothKindsInAShardedNet) {
  for (const int stage : {1, 2}) {
    for (const int64_t first : {0, 2}) {
      const auto error = error_on_ranks(2, [&](Rank& rank) {
        DataParallel net(torch::nn::Linear(4, 3), rank, {.sharded = static_cast<Sharded>(stage)});
        const lockstep::Optimizer sgd(net, torch::optim::SGDOptions(0.1));
        net.loss(batch_of(rank, 8, first), F::cross_entropy).backward();
        net.loss(batch_of(rank, 8, 2 - first), F::cross_entropy).backward();
      });
      EXPECT_THAT(error, Refused()) << stage << " " << first;
    }
  }
}

// A BatchNorm has no variance of one value.
TEST(GrainRefusalsTest, OfOneSampleWhereABatchNormNormalisesOneValue) {
  const auto training = [](int64_t samples_of_all, bool by_criterion) {
    return error_on_ranks(2, [=](Rank& rank) {
      DataParallel net(torch::nn::Sequential(torch::nn::Linear(4, 3), torch::nn::BatchNorm1d(3)), rank);
      const Batch batch = batch_of(rank, samples_of_all, 4);
      const auto own = [&](const Batch& part) { return F::cross_entropy(net(part.x), part.y); };
      (by_criterion ? net.loss(batch, F::cross_entropy) : net.loss(batch, own)).backward();
    });
  };
  for (const bool by_criterion : {true, false}) {
    EXPECT_EQ(training(10, by_criterion), "(no error)");
    EXPECT_THAT(training(13, by_criterion), Refused());
  }
}

TEST(GrainRefusalsTest, OfLossesWithoutAGraph) {
  EXPECT_THAT(error_on_ranks(2,
                             [](Rank& rank) {
                               DataParallel net(torch::nn::Linear(4, 3), rank);
                               const torch::NoGradGuard no_grad;
                               net.loss(batch_of(rank, 8, 2), F::cross_entropy).backward();
                             }),
              Refused());
}

TEST(GrainRefusalsTest, OfComputingAgainWhereParametersAreDivided) {
  EXPECT_THAT(error_on_ranks(2,
                             [](Rank& rank) {
                               DataParallel net(torch::nn::Linear(4, 3), rank,
                                                {.sharded = Sharded::parameters,
                                                 .grain_check = std::make_shared<lockstep::IdleCheck>()});
                             }),
              Refused());
}

}  // namespace grain_refusals_test
