// Labels: concurrency 3x3 2x4
// shard() and unshard() over 1 to 4 CPU ranks, against the net that was sharded: random nets under random rules, the
// program's models, dropout, bad input. What is exchanged: shard_traffic_test.cpp.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/models/models.hpp>
#include <lockstep/models/residual_block.hpp>
#include <lockstep/nn/dropout.hpp>
#include <lockstep/nn/sample_scope.hpp>

#include "nn/random_layers.hpp"
#include "support/error_of.hpp"
#include "support/group_tests.hpp"
#include "support/sharded_training.hpp"

#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {
namespace shard_test {

using torch::Tensor;
using torch::nn::Sequential;
namespace F = torch::nn::functional;

class ShardWorlds : public testing::TestWithParam<int> {
 protected:
  ShardWorlds() { torch::manual_seed(GetParam()); }  // in every process the same
};
INSTANTIATE_TEST_SUITE_P(Sizes, ShardWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

// ---- Random nets ---------------------------------------------------------------------------------------------------

class RandomNet {
 public:
  RandomNet(int seed, int world) : random_(seed), world_(world) {
    if (chance(70)) {
      add_images();
    } else {
      width_ = pick(1, 9);
      sample = {width_};
    }
    for (int64_t layers = pick(1, 4); layers > 0; --layers) add_linear(layers == 1);
  }

  Sequential net;
  std::vector<int64_t> sample;
  int64_t classes = 0;
  TensorRule rule = TensorRule::channels;

 private:
  int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_); }
  bool chance(int percent) { return pick(1, 100) <= percent; }

  template <class Layer>
  void add(const Layer& layer) {
    net->push_back("layer" + std::to_string(net->size()), layer);
  }

  // Adds the layer, of which sometimes every rank keeps all.
  template <class Layer>
  void add_or_keep(const Layer& layer) {
    chance(20) ? add(kept(layer)) : add(layer);
  }

  void add_activation() {
    switch (pick(0, 5)) {
      case 0:
        add(torch::nn::Tanh());
        break;
      case 1:
        add(torch::nn::ReLU(torch::nn::ReLUOptions(chance(50))));
        break;
      case 2:
        add_or_keep(torch::nn::Sigmoid());
        break;
      case 3:
        add(torch::nn::GELU());
        break;
      default:
        break;
    }
  }

  void add_images() {
    int64_t channels = pick(1, 3), size = pick(7, 9);
    sample = {channels, size, size};
    if (chance(50)) rule = TensorRule::alternating;
    for (int64_t convolutions = pick(1, 4); convolutions > 0 && size > 3; --convolutions) {
      const int64_t out = 12 * pick(1, 2);
      if (size >= 4 && chance(20)) {
        add_or_keep(ConvReluPool(channels, out, 3));
        size = (size - 2) / 2;
      } else {
        add_convolution(channels, out);
      }
      channels = out;
      if (chance(40)) add_or_keep(torch::nn::BatchNorm2d(channels));
      add_activation();
      if (size > 3 && chance(30)) {
        add(torch::nn::MaxPool2d(2));
        size /= 2;
      }
    }
    add_or_keep(torch::nn::Flatten());
    width_ = channels * size * size;
  }

  void add_convolution(int64_t channels, int64_t out) {
    const int64_t groups = channels % 12 == 0 && chance(40) ? std::vector<int64_t>{2, 3, 4, 12}[pick(0, 3)] : 1;
    const bool fits = groups % world_ == 0 || world_ % groups == 0;
    const auto options = torch::nn::Conv2dOptions(channels, out, 3).padding(1).bias(chance(70)).groups(groups);
    fits ? add_or_keep(torch::nn::Conv2d(options)) : add(kept(torch::nn::Conv2d(options)));
  }

  void add_linear(bool last) {
    const int64_t out = pick(4, 13);  // at least one unit for each of four ranks
    add_or_keep(torch::nn::Linear(torch::nn::LinearOptions(width_, out).bias(chance(80))));
    width_ = classes = out;
    if (last) return;
    if (chance(30)) add_or_keep(torch::nn::BatchNorm1d(out));
    add_activation();
  }

  std::mt19937 random_;
  const int world_;
  int64_t width_ = 0;
};

TEST_P(ShardWorlds, RandomNetsTrainAsOnOneDevice) {
  for (int round = 0; round < 25; ++round) {
    const RandomNet random(100 * GetParam() + round, GetParam());
    SCOPED_TRACE(testing::Message() << "round " << round << "\n" << random.net);
    expect_sharded_trains_as_whole(random.net, random.sample, random.classes, GetParam(), random.rule);
  }
}

// ---- Models, frozen weights, dropout
// ---------------------------------------------------------------------------------

// The models that the program has, in small.
class ShardModels : public ShardWorlds {};
INSTANTIATE_TEST_SUITE_P(Sizes, ShardModels, testing::Values(1, 2, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

TEST_P(ShardModels, TrainAsOnOneDevice) {
  const std::vector<ModelOptions> list{{.name = "mlp", .width = 0.05},
                                       {.name = "alexnet", .width = 0.05, .image_size = 65, .dropout = 0},
                                       {.name = "alexnet", .width = 0.05, .image_size = 65, .groups = 2, .dropout = 0},
                                       {.name = "resnet18", .width = 0.125, .image_size = 16}};
  for (const auto& options : list) {
    SCOPED_TRACE(to_string(options));
    expect_sharded_trains_as_whole(make_model(options), {1, 28, 28}, 10, GetParam());
  }
  if (GetParam() <= 2) expect_sharded_trains_as_whole(make_model({.name = "lenet"}), {1, 28, 28}, 10, GetParam());
}

TEST_P(ShardWorlds, FrozenPartsOfResidualBlocksStayFrozen) {
  ResidualBlock block(12, 24);
  block->shortcut->parameters()[0].requires_grad_(false);
  block->named_parameters()["norm2.bias"].requires_grad_(false);
  Sequential net({{"block", block}});
  run(test_devices(GetParam()), [&](Rank& rank) {
    const auto whole = net->named_parameters();
    for (const auto& item : shard(net, rank)->named_parameters()) {
      EXPECT_EQ(item.value().requires_grad(), whole[item.key()].requires_grad()) << item.key();
    }
  });
}

// In float32 and channels-last memory, a block's norms take kernels of their own, also split.
TEST_P(ShardWorlds, ResidualBlocksComputeAsWholeInFloat32) {
  const auto in_channels_last = [](const Tensor& images) { return images.contiguous(at::MemoryFormat::ChannelsLast); };
  Sequential net({{"block1", ResidualBlock(12, 24, 2)}, {"block2", ResidualBlock(24, 24)}});
  for (const auto& parameter : net->parameters()) {
    if (parameter.dim() == 4) parameter.set_data(in_channels_last(parameter));
  }
  Sequential whole = copy_of(net);
  whole->to(torch::kDouble);
  const Tensor x = in_channels_last(torch::randn({4, 12, 8, 8}));
  const Tensor expected = whole->forward(x.to(torch::kDouble));
  expected.square().sum().backward();
  run(test_devices(GetParam()), [&](Rank& rank) {
    Sequential part = shard(net, rank), joined = copy_of(net);
    const Tensor y = part->forward(x);
    EXPECT_TRUE(y.is_contiguous(at::MemoryFormat::ChannelsLast));
    EXPECT_TRUE(y.allclose(expected.to(torch::kFloat), 1e-4, 1e-4));
    y.square().sum().backward();
    torch::optim::SGD(part->parameters(), 1e-3).step();
    unshard(part, rank, joined);
    const auto buffers = whole->named_buffers();
    for (const auto& item : joined->named_buffers()) {
      EXPECT_TRUE(item.value().to(torch::kDouble).allclose(buffers[item.key()].to(torch::kDouble), 1e-5, 1e-6))
          << item.key();
    }
    const auto parameters = whole->named_parameters();
    for (const auto& item : joined->named_parameters()) {
      const Tensor stepped = parameters[item.key()] - 1e-3 * parameters[item.key()].grad();
      EXPECT_TRUE(item.value().to(torch::kDouble).allclose(stepped, 1e-4, 1e-4)) << item.key();
    }
  });
}

TEST_P(ShardWorlds, DropoutIsTheSameOverAnyNumberOfRanks) {
  Sequential net({{"conv", torch::nn::Conv2d(1, 12, 3)},
                  {"drop_channels", torch::nn::Dropout2d(0.3)},
                  {"flatten", torch::nn::Flatten()},
                  {"fc1", torch::nn::Linear(12 * 4, 9)},
                  {"drop_whole", torch::nn::Dropout(0.4)},
                  {"fc2", torch::nn::Linear(9, 13)},
                  {"drop_slices", torch::nn::Dropout(0.5)},
                  {"fc3", torch::nn::Linear(13, 5)},
                  {"drop_whole_result", torch::nn::Dropout(0.1)}});
  net->to(torch::kDouble);
  const TrainingBatch batch = batches_of({1, 4, 4}, 5, 1)[0];
  const auto trained = [&](Rank& rank) {
    Sequential part = shard(net, rank), joined = copy_of(net);
    torch::optim::SGD sgd(part->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      const SampleScope scope({.seed = 5, .step = step, .first = 0, .size = batch.x.size(0)});
      sgd.zero_grad();
      F::cross_entropy(part->forward(batch.x), batch.y).backward();
      sgd.step();
    }
    unshard(part, rank, joined);
    return joined;
  };
  run(test_devices(GetParam()), [&](Rank& rank) {
    Sequential alone;
    run(test_devices(1), [&](Rank& one) { alone = trained(one); });
    Sequential together = trained(rank);
    const auto expected = alone->named_parameters();
    for (const auto& item : together->named_parameters()) {
      expect_near(item.value().detach(), expected[item.key()].detach(), kTolerance, item.key());
    }
  });
}

TEST_P(ShardWorlds, LibTorchsDropoutsDropWhatLockstepsDoInTheWholeNet) {
  const Tensor x = torch::ones({4, 12, 3, 2});
  Sequential whole(
      {{"channels", Dropout(DropoutImpl::Options{.p = 0.3, .whole_channels = true})}, {"values", Dropout(0.4)}});
  name_dropouts(*whole);
  Sequential net({{"conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(12, 12, 1).bias(false))},
                  {"channels", torch::nn::Dropout2d(0.3)},
                  {"values", torch::nn::Dropout(0.4)}});
  {
    const torch::NoGradGuard no_grad;
    net->parameters()[0].copy_(torch::eye(12).view({12, 12, 1, 1}));
  }
  run(test_devices(GetParam()), [&](Rank& rank) {
    const auto dropped = [&](Sequential layers) {
      const SampleScope scope({.seed = 5, .step = 2, .first = 0, .size = 4});
      return layers->forward(x).detach();
    };
    expect_near(dropped(shard(net, rank)), dropped(copy_of(whole)), 1e-6, "what is left");
    EXPECT_THAT(error_of([&] { shard(net, rank)->forward(x); }), Refused());
  });
}

TEST_P(ShardWorlds, PartsTakeOverNamesTypesFrozenWeightsAndMode) {
  Sequential net = lenet_of_layers();
  for (auto& item : net->named_parameters()) {
    if (item.key().starts_with("conv1") || item.key() == "fc2.bias") item.value().requires_grad_(false);
  }
  net->eval();
  run(test_devices(GetParam()), [&](Rank& rank) {
    Sequential part = shard(net, rank);
    const auto whole = net->named_parameters(), mine = part->named_parameters();
    EXPECT_EQ(whole.keys(), mine.keys());
    for (const auto& item : mine) {
      EXPECT_EQ(item.value().requires_grad(), whole[item.key()].requires_grad()) << item.key();
      EXPECT_FALSE(item.value().is_alias_of(whole[item.key()])) << item.key();
    }
    EXPECT_EQ(mine["conv2.weight"].sizes(), at::IntArrayRef({24 / rank.world_size(), 12, 3, 3}));
    for (const auto& module : part->modules()) EXPECT_FALSE(module->is_training());
    part->train();
    for (const auto& module : part->modules()) EXPECT_TRUE(module->is_training());
  });
}

// ---- Bad input -----------------------------------------------------------------------------------------------------

Caught error_of_shard(const Sequential& net, int world) {
  return error_of([&] { run(test_devices(world), [&](Rank& rank) { shard(net, rank); }); });
}

TEST(ShardTest, WhatCannotBeSplitIsAnErrorWithTheLayersName) {
  EXPECT_THAT(error_of_shard(lenet_of_layers(), 5), Refused());
  EXPECT_THAT(error_of_shard(multilayer_perceptron(), 6), Refused());
  Sequential unknown({{"fc", torch::nn::Linear(4, 4)}, {"softmax", torch::nn::Softmax(1)}});
  EXPECT_THAT(error_of_shard(unknown, 2), Refused());
  Sequential kept_whole({{"fc", torch::nn::AnyModule(torch::nn::Linear(4, 4))},
                         {"softmax", torch::nn::AnyModule(kept(torch::nn::Softmax(1)))}});
  EXPECT_EQ(error_of_shard(kept_whole, 2), "(no error)");
  EXPECT_THAT(error_of_shard(Sequential(), 1), Refused());
  const torch::nn::Linear twice(4, 4);
  EXPECT_THAT(error_of_shard(Sequential({{"fc1", twice}, {"fc2", twice}}), 2), Refused());
}

TEST(ShardTest, UnshardNeedsANetLikeTheOneThatWasSharded) {
  const auto error = [](const Sequential& other) {
    return error_of([&] {
      run(test_devices(2), [&](Rank& rank) {
        Sequential net = copy_of(other);
        unshard(shard(multilayer_perceptron(), rank), rank, net);
      });
    });
  };
  EXPECT_EQ(error(multilayer_perceptron()), "(no error)");
  EXPECT_THAT(error(lenet_of_layers()), Refused());
  EXPECT_THAT(error(Sequential({{"fc1", torch::nn::Linear(6, 9)}})), Refused());
}

// Slices of different samples would be added, and every rank would train all the same.
TEST(ShardTest, SamplesThatDifferWithinTheGroupAreRefusedOnAllRanks) {
  const auto layers = [] {
    return std::vector<std::pair<Sequential, Tensor>>{
        {multilayer_perceptron(), torch::randn({12, 7}, torch::kDouble)},
        {lenet_of_layers(), torch::randn({12, 1, 14, 14}, torch::kDouble)},
        {Sequential(torch::nn::Embedding(9, 6), torch::nn::Linear(6, 4)), torch::randint(9, {12, 5})}};
  };
  for (const bool trains : {true, false}) {
    for (const int world : {2, 3}) {
      for (size_t which = 0; which < 3; ++which) {
        const auto error = [&](const auto& shift_of) {
          return error_of([&] {
            run(test_devices(static_cast<size_t>(world)), [&](Rank& rank) {
              auto [net, all] = rank.in_turn([&] {
                torch::manual_seed(1);
                return layers()[which];
              });
              net->to(torch::kDouble);
              Sequential part = shard(net, rank);
              const torch::AutoGradMode mode(trains);
              for (int64_t step = 0; step < 2; ++step) {
                const Tensor x = all.slice(0, step + shift_of(rank), step + shift_of(rank) + 6).to(rank.device());
                const Tensor y = part->forward(x);
                if (trains) y.square().mean().backward();
              }
            });
          });
        };
        EXPECT_THAT(error([](Rank& rank) { return rank.index(); }), Fails(Error::difference)) << which << world;
        EXPECT_EQ(error([](Rank&) { return 0; }), "(no error)") << which << world;
      }
    }
  }
}

}  // namespace shard_test
}  // namespace lockstep
