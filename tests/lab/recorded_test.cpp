// Labels: gpu
// Recorded: a loop's recorded step gives what the loop gives, on one GPU, on one that ranks share, over NCCL, and on
// the CPU, where nothing is recorded.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/sync_batch_norm.hpp>
#include <lockstep/devices/autocast.hpp>
#include <lockstep/devices/device_info.hpp>
#include <lockstep/lab.hpp>
#include <lockstep/lockstep.hpp>

#include "support/error_of.hpp"
#include "support/scratch_folder.hpp"
#include "support/simulated_device.hpp"

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace recorded_test {

namespace F = torch::nn::functional;
namespace nn = torch::nn;
using lockstep::Batch;
using lockstep::DataParallel;
using lockstep::Devices;
using lockstep::error_of;
using lockstep::Optimizer;
using lockstep::Rank;
using lockstep::Recorded;

const Devices cpus = {torch::kCPU, torch::kCPU};
const Devices one_gpu = {c10::Device("cuda:0")}, shared_gpu = {c10::Device("cuda:0"), c10::Device("cuda:0")};

class RecordedSteps : public testing::Test {
 protected:
  void SetUp() override {
    if (lockstep::gpus().empty()) GTEST_SKIP() << "LibTorch finds no GPU here";
  }

  static std::vector<Devices> worlds() {
    std::vector<Devices> worlds = {one_gpu, shared_gpu, cpus};
    if (lockstep::gpus().size() > 1) worlds.push_back({c10::Device("cuda:0"), c10::Device("cuda:1")});
    return worlds;
  }
};

// A step of somebody's own loop.
using StepOf = std::function<torch::Tensor(const Batch&)>;
struct Training {
  std::function<void(Optimizer&, int step)> before_step = [](Optimizer&, int) {};
  std::function<std::unique_ptr<Optimizer>(DataParallel<nn::SequentialImpl>&)> optimizer = [](auto& net) {
    return std::make_unique<Optimizer>(net, torch::optim::SGDOptions(0.1).momentum(0.9));
  };
  lockstep::StepOptions options = {};
  std::function<std::shared_ptr<lockstep::CommunicationHook>()> hook = [] { return nullptr; };
  int64_t grain = 0;
  lockstep::Criterion criterion = F::cross_entropy;
  bool mixes = false;  // every third step is an ordinary one
  lockstep::Sharded sharded = lockstep::Sharded::nothing;
};

nn::Sequential net_of(Rank& rank) {
  return rank.in_turn([] {
    torch::manual_seed(1);
    return nn::Sequential(nn::Linear(6, 16), nn::ReLU(), lockstep::Dropout(0.25), nn::Linear(16, 3));
  });
}

lockstep::Dataset data_of(int64_t samples) {
  torch::manual_seed(2);
  return {torch::randn({samples, 6}), torch::randint(3, {samples})};
}

// Gives rank 0's weights and losses, of steps that are recorded or not.
std::vector<torch::Tensor> trained(const Devices& devices, const Training& how, bool records) {
  const auto data = data_of(30);
  std::vector<torch::Tensor> result;
  lockstep::run(devices, [&](Rank& rank) {
    DataParallel net(net_of(rank), rank, {.hook = how.hook(), .sharded = how.sharded});
    const auto optimizer = how.optimizer(net);
    std::optional<Recorded> recorded;
    if (records) recorded.emplace(net, *optimizer, how.criterion, how.options);
    std::vector<torch::Tensor> losses;
    int step = 0;
    for (int epoch = 1; epoch <= 3; ++epoch) {  // each has three full batches and a smaller one
      optimizer->set_lr(0.1 / epoch);
      for (const auto& batch : lockstep::batches(data, {.size = 8, .epoch = epoch, .grain = how.grain}, rank)) {
        how.before_step(*optimizer, step++);
        if (recorded && !(how.mixes && step % 3 == 0)) {
          losses.push_back((*recorded)(batch));
          continue;
        }
        optimizer->zero_grad();
        lockstep::Loss loss = net.loss(batch, how.criterion);
        loss.backward();
        optimizer->step(how.options);
        losses.push_back(loss.value());
      }
    }
    const auto whole = net.whole();
    if (rank.index() > 0) return;
    for (const auto& loss : losses) result.push_back(loss.detach().cpu());
    for (const auto& parameter : net->parameters()) result.push_back(parameter.detach().cpu());
  });
  return result;
}

void expect_alike(const Devices& devices, const Training& how) {
  SCOPED_TRACE(lockstep::to_string(devices));
  const auto recorded = trained(devices, how, true), expected = trained(devices, how, false);
  ASSERT_EQ(recorded.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    if (lockstep::simulated::is_there() || devices == cpus) {
      EXPECT_TRUE(recorded[i].equal(expected[i])) << i << ": " << recorded[i] << " " << expected[i];
    } else {
      EXPECT_TRUE(recorded[i].allclose(expected[i], 1e-4, 1e-5)) << i;
    }
  }
}

TEST_F(RecordedSteps, GiveWhatTheLoopGivesWithEveryOptimizer) {
  const std::vector<Training> ways = {
      {},
      {.optimizer = [](auto& net) { return std::make_unique<Optimizer>(net, torch::optim::AdamWOptions(0.01)); },
       .options = {.clip = 0.5}},
      // This update is not in the graph.
      {.optimizer = [](auto& net) { return std::make_unique<Optimizer>(net, torch::optim::RMSpropOptions(0.01)); }},
  };
  for (const auto& devices : worlds()) {
    for (const auto& way : ways) expect_alike(devices, way);
  }
}

TEST_F(RecordedSteps, FollowWhatIsFrozenAndTheOptionsOfTheOptimizer) {
  const auto freeze = [](Optimizer& optimizer, int step) {
    optimizer.param_groups()[0].params()[0].set_requires_grad(step < 5 || step > 7);
  };
  const auto decay = [](Optimizer& optimizer, int step) {
    if (step == 6) Optimizer::set_weight_decay(optimizer.param_groups()[0], 0.3);
  };
  for (const auto& devices : worlds()) {
    expect_alike(devices, {.before_step = freeze});
    expect_alike(devices, {.before_step = decay});
  }
}

TEST_F(RecordedSteps, DoNotMindGradientsThatTheUserHasClearedOrSpoilt) {
  const auto clear = [](Optimizer& optimizer, int) { optimizer.zero_grad(); };
  const auto spoil = [](Optimizer& optimizer, int) {
    for (auto& group : optimizer.param_groups()) {
      for (auto& parameter : group.params()) parameter.mutable_grad() = torch::full_like(parameter, 7);
    }
  };
  const auto rmsprop = [](auto& net) { return std::make_unique<Optimizer>(net, torch::optim::RMSpropOptions(0.01)); };
  for (const auto& devices : worlds()) {
    expect_alike(devices, {.before_step = clear});
    expect_alike(devices, {.before_step = clear, .optimizer = rmsprop});
    if (devices == one_gpu) expect_alike(devices, {.before_step = spoil, .optimizer = rmsprop});
  }
}

TEST_F(RecordedSteps, TakeTurnsWithOrdinarySteps) {
  const auto rmsprop = [](auto& net) { return std::make_unique<Optimizer>(net, torch::optim::RMSpropOptions(0.01)); };
  for (const auto& devices : worlds()) {
    expect_alike(devices, {.mixes = true});
    expect_alike(devices, {.optimizer = rmsprop, .mixes = true});
  }
}

TEST_F(RecordedSteps, GoOnFromWhatALoadHasReplaced) {
  const lockstep::ScratchFolder folder;
  const auto file = folder.path() / "adam.safetensors";
  const auto save_and_load = [&](Optimizer& optimizer, int step) {
    if (step == 6) optimizer.save(file);
    if (step == 8) optimizer.load(file);
    auto& first = optimizer.param_groups()[0].params()[0];
    if (step == 10) first.set_data(first.detach() + 1);
  };
  const auto adam = [](auto& net) { return std::make_unique<Optimizer>(net, torch::optim::AdamOptions(0.01)); };
  for (const auto& devices : worlds()) expect_alike(devices, {.before_step = save_and_load, .optimizer = adam});
}

TEST_F(RecordedSteps, ComputeInMixedPrecision) {
  const auto loss_with = [](bool records) {
    std::vector<float> losses;
    lockstep::run(one_gpu, [&](Rank& rank) {
      DataParallel net(net_of(rank), rank);
      Optimizer sgd(net, torch::optim::SGDOptions(0.1));
      Recorded step(net, sgd, F::cross_entropy);
      const auto data = data_of(8);
      for (int i = 0; i < 8; ++i) {
        for (const auto& batch : lockstep::batches(data, {.size = 8, .epoch = i}, rank)) {
          const lockstep::Autocast bf16(rank.device(), torch::kBFloat16, i % 2 == 0 || i > 5);
          if (records) {
            losses.push_back(step(batch).item<float>());
            continue;
          }
          sgd.zero_grad();
          lockstep::Loss loss = net.loss(batch, F::cross_entropy);
          loss.backward();
          sgd.step();
          losses.push_back(loss.value().item<float>());
        }
      }
    });
    return losses;
  };
  EXPECT_THAT(loss_with(true),
              testing::Pointwise(testing::FloatNear(lockstep::simulated::is_there() ? 0 : 0.01), loss_with(false)));
}

TEST_F(RecordedSteps, RefuseBatchesOfOtherShapes) {
  const auto error = error_of([] {
    lockstep::run(one_gpu, [](Rank& rank) {
      DataParallel net(nn::Sequential(nn::Linear(6, 3)), rank);
      Optimizer sgd(net, torch::optim::SGDOptions(0.1));
      Recorded step(net, sgd,
                    [](const torch::Tensor& y_hat, const torch::Tensor& y) { return (y_hat - y).square().mean(); });
      const auto batch = [&](int64_t columns) {
        return Batch{
            .x = torch::ones({4, 6}, rank.device()), .y = torch::ones({4, columns}, rank.device()), .global_size = 4};
      };
      for (int i = 0; i < 5; ++i) step(batch(3));
      step(batch(1));
    });
  });
  EXPECT_THAT(error, testing::HasSubstr("of sizes [4, 1]"));
}

struct Halving : lockstep::CommunicationHook {
  Round average(const lockstep::GradientBucket& bucket, Rank& rank) override {
    bucket.flat.div_(2 * rank.world_size());
    return {.work = post_allreduce(rank, bucket.flat)};
  }
};

TEST_F(RecordedSteps, HoldHooksGrainsAndSlicesWhereTheExchangeIsNcclsOrThereIsNone) {
  for (const auto& devices : worlds()) {
    expect_alike(devices, {.hook = [] { return std::make_shared<Halving>(); }});
    if (devices == shared_gpu) continue;
    expect_alike(devices, {.grain = 4});
    const auto options = F::CrossEntropyFuncOptions().ignore_index(1);
    expect_alike(devices, {.criterion = {F::cross_entropy, options}});
    expect_alike(devices, {.grain = 4, .criterion = {F::cross_entropy, options}});
    expect_alike(devices, {.sharded = lockstep::Sharded::state});
    expect_alike(devices, {.sharded = lockstep::Sharded::gradients});
  }
}

// A copy of x and one of y, the step's number, by which Dropout draws, the replay, and a copy of the loss.
TEST_F(RecordedSteps, AreFiveLaunches) {
  if (!lockstep::simulated::is_there()) GTEST_SKIP() << "a real GPU does not count its launches";
  lockstep::run(one_gpu, [](Rank& rank) {
    DataParallel net(net_of(rank), rank);
    Optimizer sgd(net, torch::optim::SGDOptions(0.1));
    Recorded step(net, sgd, F::cross_entropy);
    const Batch batch{.x = torch::ones({4, 6}, rank.device()),
                      .y = torch::zeros({4}, torch::TensorOptions(rank.device()).dtype(torch::kLong)),
                      .global_size = 4};
    for (int i = 0; i < 5; ++i) step(batch);
    const int64_t before = lockstep::simulated::launches();
    step(batch);
    EXPECT_EQ(lockstep::simulated::launches() - before, 5);
  });
}

TEST_F(RecordedSteps, RefuseWhatNoGraphHolds) {
  const auto refused = [](const Devices& devices, const lockstep::DataParallelOptions& options,
                          const lockstep::StepOptions& step_options, int64_t grain, bool with_norm) {
    return error_of([&, data = data_of(8)] {
      lockstep::run(devices, [&](Rank& rank) {
        nn::Sequential module = net_of(rank);
        if (with_norm) module->push_back(lockstep::SyncBatchNorm(nn::BatchNormOptions(3), rank));
        DataParallel net(module, rank, options), other(net_of(rank), rank);
        Optimizer sgd(net, torch::optim::SGDOptions(0.1)), others(other, torch::optim::SGDOptions(0.1));
        EXPECT_THAT(error_of([&] { Recorded(net, others, F::cross_entropy); }), lockstep::Refused("optimizer"));
        Recorded step(net, sgd, F::cross_entropy, step_options);
        if (rank.device().is_cuda())
          EXPECT_THAT(error_of([&] { Recorded(net, sgd, F::cross_entropy); }), lockstep::Refused("optimizer"));
        EXPECT_THAT(error_of([&] {
                      const auto guard = net.no_sync();
                      step({});
                    }),
                    lockstep::Refused("no_sync"));
        for (const auto& batch : lockstep::batches(data, {.size = 8, .grain = grain}, rank)) step(batch);
      });
    });
  };
  using lockstep::Refused;
  EXPECT_EQ(refused(cpus, {}, {}, 4, false), "(no error)");
  EXPECT_EQ(refused(one_gpu, {}, {}, 0, true), "(no error)");
  EXPECT_THAT(refused(cpus, {}, {.skip_not_finite = true}, 0, false), Refused("skip_not_finite"));
  EXPECT_THAT(refused(one_gpu, {.sharded = lockstep::Sharded::parameters}, {}, 0, false), Refused("sharded"));
  EXPECT_THAT(refused(shared_gpu, {.sharded = lockstep::Sharded::state}, {}, 0, false), Refused("devices"));
  EXPECT_THAT(refused(shared_gpu, {}, {}, 0, true), Refused("devices"));
  EXPECT_THAT(refused(shared_gpu, {}, {}, 4, false), Refused("devices"));
}

}  // namespace recorded_test
