// Labels: concurrency
// With a grain and parameters that are divided among the ranks (ZeRO 3), ranks with fewer grains compute stand-ins.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>

#include "support/group_tests.hpp"
#include "support/random_training.hpp"

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace grain_stand_ins_test {

using lockstep::Batch;
using lockstep::batch_of;
using lockstep::DataParallel;
using lockstep::Dataset;
using lockstep::Error;
using lockstep::error_on_ranks;
using lockstep::Fails;
using lockstep::NoSync;
using lockstep::Optimizer;
using lockstep::Rank;
using lockstep::Refused;
using lockstep::Sharded;
using torch::Tensor;
namespace F = torch::nn::functional;

const torch::optim::SGDOptions kSgd(0.1);

// Rank 0 has two of five grains, and the others have none of a single one.
TEST(GrainStandInsTest, AreComputedWhereOthersHaveMoreGrainsAndLeaveNothingBehind) {
  lockstep::run(lockstep::test_devices(4), [](Rank& rank) {
    torch::nn::BatchNorm1d norm(4);
    DataParallel net(torch::nn::Sequential(norm, torch::nn::Linear(4, 3)), rank, {.sharded = Sharded::parameters});
    Optimizer sgd(net, kSgd);
    for (const int64_t samples : {10, 2}) {
      int64_t batches = norm->num_batches_tracked.item<int64_t>();
      std::vector<int64_t> grains, stand_ins;
      const Batch batch = batch_of(rank, samples, 2);
      auto loss = net.loss(batch, [&](const Batch& part) {
        (lockstep::SampleScope::current()->place().again ? stand_ins : grains).push_back(part.size());
        return F::cross_entropy(net(part.x), part.y);
      });
      loss.backward();
      const size_t own = samples == 10 ? (rank.index() == 0 ? 2 : 1) : (rank.index() == 0 ? 1 : 0);
      EXPECT_EQ(grains, std::vector<int64_t>(own, 2));
      EXPECT_EQ(stand_ins, std::vector<int64_t>((samples == 10 ? 2 : 1) - own, 2));
      if (own == 0) EXPECT_EQ(loss.item(), 0);
      EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), batches + samples / 2);
      sgd.step();
    }
  });
}

TEST(GrainStandInsTest, NeedAnExample) {
  const auto training = [](bool with_example) {
    return error_on_ranks(3, [=](Rank& rank) {
      DataParallel net(torch::nn::Linear(4, 3), rank, {.sharded = Sharded::parameters});
      Optimizer sgd(net, kSgd);
      Batch batch = batch_of(rank, 8, 4);
      if (!with_example) batch.like = {};
      net.loss(batch, F::cross_entropy).backward();
    });
  };
  EXPECT_EQ(training(true), "(no error)");
  EXPECT_THAT(training(false), Refused());
}

TEST(GrainStandInsTest, NeedAnExampleThatIsLikeTheBatch) {
  using Change = std::function<void(Batch&)>;
  const auto training = [](const Change& change) {
    return error_on_ranks(3, [&](Rank& rank) {
      DataParallel net(torch::nn::Linear(4, 3), rank, {.sharded = Sharded::parameters});
      Optimizer sgd(net, kSgd);
      Batch batch = batch_of(rank, 8, 4);
      batch.x = batch.x.unsqueeze(1);
      if (batch.like.x.defined()) batch.like.x = batch.like.x.unsqueeze(1);
      change(batch);
      net.loss(batch, [&](const Batch& part) { return F::cross_entropy(net(part.x.flatten(1)), part.y); }).backward();
    });
  };
  EXPECT_EQ(training([](Batch&) {}), "(no error)");
  EXPECT_THAT(training([](Batch& batch) { batch.x = batch.x.flatten(1); }), Refused());
  EXPECT_THAT(training([](Batch& batch) {
                if (batch.size() == 0) batch.y = batch.y.to(torch::kInt);
              }),
              Refused());
  EXPECT_THAT(training([](Batch& batch) { batch.more["mask"] = batch.x; }), Refused());
}

// Three ranks have two, two and one of five grains. With divided parameters they compute each part equally often.
TEST(GrainStandInsTest, NeedPartsThatAllRanksHave) {
  const auto training = [](Sharded sharded) {
    return error_on_ranks(3, [sharded](Rank& rank) {
      DataParallel net(torch::nn::Linear(4, 3), rank, {.sharded = sharded});
      Optimizer sgd(net, kSgd);
      Batch batch = batch_of(rank, 10, 2);
      batch.runs.clear();
      const auto parts = batch.in_parts(2);
      for (size_t i = 0; i < parts.size(); ++i) {
        std::optional<NoSync> more;
        if (i + 1 < parts.size()) more.emplace(net.replica());
        net.loss(parts[i], F::cross_entropy).backward();
      }
    });
  };
  EXPECT_EQ(training(Sharded::state), "(no error)");
  EXPECT_THAT(training(Sharded::parameters), Refused());
}

struct CountingNetImpl : torch::nn::Module {
  CountingNetImpl() { count = register_buffer("count", torch::zeros({}, torch::kLong)); }
  Tensor forward(const Tensor& x) {
    count.add_(1);
    return linear(x);
  }
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(4, 3));
  Tensor count;
};
TORCH_MODULE(CountingNet);

TEST(GrainStandInsTest, LeaveBuffersOfAModuleOfYourOwnAsTheyAre) {
  lockstep::run(lockstep::test_devices(4), [](Rank& rank) {
    const CountingNet module;
    DataParallel net(module, rank, {.sharded = Sharded::parameters});
    Optimizer sgd(net, kSgd);
    net.loss(batch_of(rank, 10, 2), F::cross_entropy).backward();  // five grains
    EXPECT_EQ(module->count.item<int64_t>(), rank.index() == 0 ? 2 : 1);
  });
}

TEST(GrainStandInsTest, LayersThatOneGrainAloneUsesAreNamed) {
  const auto error = error_on_ranks(2, [](Rank& rank) {
    DataParallel net(torch::nn::Sequential(lockstep::UnevenLayers(4)), rank,
                     {.bucket_bytes = 1, .sharded = Sharded::parameters});
    Optimizer sgd(net, kSgd);
    const Dataset data{torch::ones({2, 4}) * torch::tensor({1.0F, 0.0F}).view({2, 1}), torch::zeros({2}, torch::kLong)};
    for (const auto& batch :
         lockstep::batches(data.to(rank.device()), {.size = 2, .shuffle = false, .grain = 1}, rank)) {
      net.loss(batch, F::cross_entropy).backward();
    }
  });
  EXPECT_THAT(error, Fails(Error::difference));
}

}  // namespace grain_stand_ins_test
