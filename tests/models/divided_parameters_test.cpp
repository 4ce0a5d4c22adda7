// Labels: concurrency arithmetic
// Layers of models whose parameters are divided among the ranks (ZeRO 3): their kernels read parameters by addresses.
#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/devices/memory_format.hpp>
#include <lockstep/models/conv_relu_pool.hpp>
#include <lockstep/models/linear.hpp>
#include <lockstep/models/residual_block.hpp>
#include <lockstep/nn/tensor_files.hpp>

#include "support/group_tests.hpp"

#include <memory>
#include <string>

namespace lockstep {
namespace divided_parameters_test {

namespace F = torch::nn::functional;
namespace nn = torch::nn;
namespace optim = torch::optim;

nn::Sequential lenet_like() {
  return nn::Sequential(ConvReluPool(1, 6, 5), ConvReluPool(6, 16, 5), nn::Flatten(), nn::Linear(16 * 4 * 4, 33),
                        nn::Tanh(), nn::Linear(33, 10));
}

nn::Sequential resnet_like() {
  nn::Sequential layers(nn::Conv2d(nn::Conv2dOptions(1, 32, 5).stride(4)), ResidualBlock(32, 32),
                        nn::AdaptiveAvgPool2d(1), nn::Flatten(), nn::Linear(32, 10));
  set_memory_format(*layers, at::MemoryFormat::ChannelsLast);
  return layers;
}

nn::Sequential mlp_like() {
  return nn::Sequential(nn::Flatten(), FastLinear(784, 32), nn::ReLU(), FastLinear(32, 10));
}

// Tests in one process: the order of Gloo's additions is its own.
std::string hash_after_training(int ranks, Sharded sharded, const Optimizer::Make& make,
                                nn::Sequential (*make_layers)()) {
  std::string hash;
  run(test_devices(ranks), [&](Rank& rank) {
    nn::Sequential layers = rank.in_turn([&] {
      torch::manual_seed(1);
      return make_layers();
    });
    DataParallel net(layers, rank,
                     {.bucket_bytes = sharded == Sharded::nothing ? 4 << 20 : 8 << 10, .sharded = sharded});
    Optimizer optimizer(net, make);
    at::Generator generator = at::detail::createCPUGenerator(2);
    for (const int64_t size : {37, make_layers == lenet_like ? 3 : 9, 64}) {
      const Batch whole{torch::rand({size, 1, 28, 28}, generator), torch::randint(10, {size}, generator), size};
      optimizer.zero_grad();
      net.loss({slice_of(whole.x, 0, rank), slice_of(whole.y, 0, rank), size}, F::cross_entropy).backward();
      optimizer.step();
    }
    const auto whole = net.whole();
    if (rank.index() == 0) hash = weights_hash(*net);
  });
  return hash;
}

TEST(DividedParameters, GiveTheBitsOfWholeOnesOnTheSameRanks) {
  const Optimizer::Make sgd = [](const auto& groups) {
    return std::make_unique<optim::SGD>(groups, optim::SGDOptions(0.1).momentum(0.9).nesterov(true));
  };
  const Optimizer::Make adam_w = [](const auto& groups) {
    return std::make_unique<optim::AdamW>(groups, optim::AdamWOptions(0.01).weight_decay(0.1).amsgrad(true));
  };
  for (const auto make_layers : {lenet_like, resnet_like, mlp_like}) {
    for (const int ranks : {1, 2, 3, 4}) {
      for (const Optimizer::Make& make : {sgd, adam_w}) {
        EXPECT_EQ(hash_after_training(ranks, Sharded::parameters, make, make_layers),
                  hash_after_training(ranks, Sharded::nothing, make, make_layers))
            << ranks;
      }
    }
  }
}

}  // namespace divided_parameters_test
}  // namespace lockstep
