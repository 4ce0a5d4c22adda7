// Labels: concurrency arithmetic
// With a grain, a network gives the same bits on any mesh of data and pipeline, under every schedule.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/nn/dropout.hpp>
#include <lockstep/split/split_model.hpp>

#include "support/error_of.hpp"
#include "support/small_nets.hpp"
#include "support/split_training.hpp"
#include "support/tensor_bits.hpp"
#include "support/test_devices.hpp"

#include <ATen/CPUGeneratorImpl.h>

#include <functional>
#include <random>
#include <string>
#include <vector>

namespace split_grains_test {

using lockstep::Dataset;
using lockstep::ModelSplit;
using lockstep::PipelineSchedule;
using lockstep::Rank;
using lockstep::Refused;
using lockstep::SplitModel;
using torch::Tensor;
using torch::nn::Sequential;
namespace F = torch::nn::functional;

// Convolutions with BatchNorm, dropout, and layers without parameters at places where stages end.
Sequential make_net() {
  torch::manual_seed(1);
  Sequential net;
  net->push_back("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 6, 3).padding(1)));
  net->push_back("norm1", torch::nn::BatchNorm2d(6));
  net->push_back("relu", torch::nn::ReLU());
  net->push_back("flatten", torch::nn::Flatten());
  net->push_back("fc1", torch::nn::Linear(6 * 5 * 5, 20));
  net->push_back("norm2", torch::nn::BatchNorm1d(20));
  net->push_back("dropout", lockstep::Dropout(0.3));
  net->push_back("fc2", torch::nn::Linear(20, 4));
  return net;
}

Dataset samples() {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(7);
  return {torch::randn({46, 1, 5, 5}, generator), torch::randint(4, {46}, generator, torch::kLong)};
}

using Bits = lockstep::TensorBits;

struct Options {
  int zero = 0;
  double clip = 0;
  int64_t grain = 5;
};

// The whole network after an epoch of three batches, of which the last is smaller.
Bits train(const ModelSplit& split, const Options& options = {}) {
  const Dataset data = samples();
  Bits bits;
  lockstep::run(
      lockstep::test_devices(split.mesh.size()),
      [&](Rank& rank) {
        const Dataset here = data.to(rank.device());
        const Sequential whole = rank.in_turn(make_net);
        SplitModel net(lockstep::copy_of(whole), rank, split,
                       {.sharded = static_cast<lockstep::Sharded>(options.zero)});
        lockstep::Optimizer sgd(net, torch::optim::SGDOptions(0.1).momentum(0.9));
        for (const auto& batch : lockstep::batches(here, {.size = 17, .grain = options.grain}, net.mesh().data())) {
          sgd.zero_grad();
          net.loss(batch, F::cross_entropy).backward();
          sgd.step({.clip = options.clip});
        }
        Sequential all = lockstep::copy_of(whole);
        all->to(rank.device());
        const auto parameters = net.whole();
        net.gather(all);
        if (rank.index() == 0) bits = lockstep::tensor_bits(*all);
      },
      {.seed = 3});
  return bits;
}

TEST(SplitGrainsTest, NoMeshOfDataAndPipelineChangesABit) {
  const Bits one = train({});
  for (const int data : {1, 2, 3, 5}) {
    for (const int pipeline : {1, 2, 3}) {
      EXPECT_EQ(train({.mesh = {.data = data, .pipeline = pipeline}}), one) << data << " x " << pipeline;
    }
  }
}

TEST(SplitGrainsTest, NoScheduleChangesABit) {
  const Bits one = train({});
  EXPECT_EQ(train({.mesh = {.pipeline = 2}, .schedule = PipelineSchedule::gpipe}), one);
  EXPECT_EQ(
      train({.mesh = {.data = 2, .pipeline = 2}, .schedule = PipelineSchedule::interleaved, .stages_per_rank = 2}),
      one);
  EXPECT_EQ(train({.mesh = {.data = 2, .pipeline = 2}, .recompute = true}), one);
  EXPECT_EQ(train({.mesh = {.pipeline = 2}, .microbatches = 2}), one);
  EXPECT_EQ(train({.mesh = {.data = 2}, .microbatches = 3}), one);
  EXPECT_EQ(train({.mesh = {.pipeline = 2}, .cuts = {7}}), one);
}

TEST(SplitGrainsTest, ZeroOverTheDataAxisChangesNoBit) {
  const Bits one = train({});
  for (const int stage : {1, 2}) {
    EXPECT_EQ(train({.mesh = {.data = 2}}, {.zero = stage}), one);
    EXPECT_EQ(train({.mesh = {.data = 2, .pipeline = 2}}, {.zero = stage}), one);
  }
  EXPECT_EQ(train({.mesh = {.data = 3}}, {.zero = 3}), one);
  EXPECT_THAT(lockstep::error_of([] { train({.mesh = {.data = 2, .pipeline = 2}}, {.zero = 3}); }), Refused());
}

TEST(SplitGrainsTest, ClippingChangesNoBit) {
  const Bits one = train({}, {.clip = 0.01});
  EXPECT_NE(one, train({}));
  EXPECT_EQ(train({.mesh = {.data = 3}}, {.clip = 0.01}), one);
  EXPECT_EQ(train({.mesh = {.data = 2, .pipeline = 3}}, {.clip = 0.01}), one);
  for (const int stage : {1, 2, 3}) EXPECT_EQ(train({.mesh = {.data = 3}}, {.zero = stage, .clip = 0.01}), one);
}

// ---- Random small nets: also a parameter that is used twice, by some grains only, or never.

class RandomPipelines : public testing::TestWithParam<uint64_t> {};

TEST_P(RandomPipelines, ChangeNoBit) {
  const auto task = lockstep::random_task(GetParam());
  const auto trained = [&](const ModelSplit& split, int zero) {
    return lockstep::train_split(task, lockstep::test_devices(split.mesh.size()), split, zero);
  };
  const Bits one = trained({}, 0);
  std::mt19937_64 random(GetParam());
  const auto below = [&](uint64_t end) { return static_cast<int>(random() % end); };
  for (const auto schedule : {PipelineSchedule::one_f_one_b, PipelineSchedule::gpipe, PipelineSchedule::interleaved}) {
    ModelSplit split{.mesh = {.data = 1 + below(3), .pipeline = 2}, .schedule = schedule, .recompute = below(2) == 0};
    if (schedule == PipelineSchedule::interleaved) {
      split.stages_per_rank = 2;
    } else {
      split.mesh.pipeline += below(2);
    }
    const int zero = below(3);
    EXPECT_EQ(trained(split, zero), one) << to_string(split) << ", ZeRO " << zero << ", " << to_string(task);
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomPipelines, testing::Range<uint64_t>(1, 13));

// Behind a cut it would lie elsewhere, and MKL's products of a matrix and one row round by that.
TEST(SplitGrainsTest, AViewBehindACutIsRefused) {
  const auto outcome = [](const std::function<Tensor(const Tensor&)>& last, int64_t grain) {
    return lockstep::error_of([&] {
      lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
        Sequential layers(torch::nn::Linear(4, 6), torch::nn::Functional(last), torch::nn::Linear(3, 3));
        SplitModel net(layers, rank, {.mesh = {.pipeline = 2}, .cuts = {2}});
        lockstep::Optimizer sgd(net, torch::optim::SGDOptions(0.1));
        for (const auto& batch :
             lockstep::batches(lockstep::random_samples(1, 10), {.size = 10, .grain = grain}, net.mesh().data()))
          net.loss(batch, F::cross_entropy).backward();
      });
    });
  };
  const auto slice = [](const Tensor& x) { return x.narrow(1, 3, 3); };
  const auto copy = [](const Tensor& x) { return x.narrow(1, 3, 3).clone(at::MemoryFormat::Contiguous); };
  const auto turned = [](const Tensor& x) { return x.narrow(1, 0, 3).t().contiguous().t(); };
  for (const int64_t grain : {1, 4}) {
    EXPECT_EQ(outcome(copy, grain), "(no error)");
    EXPECT_THAT(outcome(slice, grain), Refused());
  }
  EXPECT_THAT(outcome(turned, 4), Refused());
  EXPECT_EQ(outcome(slice, 0), "(no error)");
}

TEST(SplitGrainsTest, AStageThatDrawsFromTheSharedGeneratorIsAWarning) {
  std::vector<std::string> warnings;
  lockstep::run(lockstep::test_devices(2),
                [](Rank& rank) {
                  Sequential layers(
                      torch::nn::Linear(4, 3), torch::nn::Linear(3, 3),
                      torch::nn::Functional([](const Tensor& x) { return torch::dropout(x, 0.5, true); }));
                  SplitModel net(layers, rank, {.mesh = {.pipeline = 2}});
                  lockstep::Optimizer sgd(net, torch::optim::SGDOptions(0.1));
                  for (const auto& batch :
                       lockstep::batches(lockstep::random_samples(1, 12), {.size = 4, .grain = 2}, net.mesh().data()))
                    net.loss(batch, F::cross_entropy).backward();
                },
                {.on_warning = [&](const std::string& text) { warnings.push_back(text); }});
  EXPECT_THAT(warnings, testing::Contains(testing::HasSubstr("drew from LibTorch's default generator")));
}

TEST(SplitGrainsTest, ASplitByChannelsIsRefused) {
  EXPECT_THAT(lockstep::error_of([] { train({.mesh = {.tensor = 2}}); }), Refused());
}

}  // namespace split_grains_test
