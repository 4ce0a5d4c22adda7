// Labels: concurrency 3x3 2x4
// Nets over 1 to 4 CPU ranks of which it is known what each layer sends: they send that and nothing else, and train as
// on one device.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/models/residual_block.hpp>

#include "support/group_tests.hpp"
#include "support/sharded_training.hpp"

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {
namespace shard_traffic_test {

using testing::ElementsAre;
using testing::IsEmpty;
using torch::Tensor;
using torch::nn::Sequential;
using Calls = std::vector<std::string>;

class ShardTrafficWorlds : public testing::TestWithParam<int> {
 protected:
  ShardTrafficWorlds() { torch::manual_seed(GetParam()); }  // in every process the same
};
INSTANTIATE_TEST_SUITE_P(Sizes, ShardTrafficWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

// The calls of each layer's forward, and of backward all together, for images or features that need no gradient.
struct Traffic {
  std::vector<std::pair<std::string, Calls>> forward;  // calls of the layers that send
  Calls backward;
};

Traffic traffic_of(const Sequential& net, const Tensor& x, Rank& rank, TensorRule rule = TensorRule::channels) {
  const auto calls = std::make_shared<Calls>();
  Rank group = counted(rank, calls);
  Sequential part = shard(net, group, rule);
  EXPECT_THAT(*calls, IsEmpty());  // shard() itself
  Traffic traffic;
  Tensor y = x;
  size_t i = 0;
  for (const auto& item : part->named_children()) {
    y = (part->begin() + static_cast<std::ptrdiff_t>(i++))->forward(y);
    if (!calls->empty()) traffic.forward.emplace_back(item.key(), *calls);
    calls->clear();
  }
  y.sum().backward();
  traffic.backward = *calls;
  return traffic;
}

const auto sends = [](const char* layer, Calls calls) {
  return std::pair<std::string, Calls>(layer, std::move(calls));
};

TEST_P(ShardTrafficWorlds, LinearLayersAlternateWithOneSumPerTwo) {
  Sequential net = multilayer_perceptron();
  expect_sharded_trains_as_whole(net, {7}, 5, GetParam());
  if (GetParam() == 1) return;
  run(test_devices(GetParam()), [&](Rank& rank) {
    const Traffic traffic = traffic_of(net, torch::ones({2, 7}, torch::kDouble), rank);
    EXPECT_THAT(traffic.forward, ElementsAre(sends("fc2", {"allreduce"}), sends("fc3", {"allgather"})));
    EXPECT_THAT(traffic.backward, ElementsAre("allreduce"));  // before fc3
  });
}

TEST_P(ShardTrafficWorlds, ChannelsStaySlicesThroughFlatten) {
  Sequential net = lenet_of_layers();
  expect_sharded_trains_as_whole(net, {1, 14, 14}, 6, GetParam());
  if (GetParam() == 1) return;
  run(test_devices(GetParam()), [&](Rank& rank) {
    const Traffic traffic = traffic_of(net, torch::ones({2, 1, 14, 14}, torch::kDouble), rank);
    EXPECT_THAT(traffic.forward,
                ElementsAre(sends("conv2", {"allgather"}), sends("fc1", {"allreduce"}), sends("fc2", {"allgather"})));
    EXPECT_THAT(traffic.backward, ElementsAre("allreduce", "reduce_scatter"));  // before fc2, before conv2
  });
}

TEST_P(ShardTrafficWorlds, AlternatingConvolutionsNeedOneSumPerTwo) {
  using Options = torch::nn::Conv2dOptions;
  Sequential net({{"conv1", torch::nn::Conv2d(Options(2, 12, 3))},
                  {"norm1", torch::nn::BatchNorm2d(12)},
                  {"relu1", torch::nn::ReLU()},
                  {"conv2", torch::nn::Conv2d(Options(12, 24, 3).stride(2))},
                  {"relu2", torch::nn::ReLU()},
                  {"conv3", torch::nn::Conv2d(Options(24, 12, 1))},
                  {"pool", torch::nn::AdaptiveAvgPool2d(1)},
                  {"flatten", torch::nn::Flatten()},
                  {"fc", torch::nn::Linear(12, 5)}});
  expect_sharded_trains_as_whole(net, {2, 9, 9}, 5, GetParam(), TensorRule::alternating);
  if (GetParam() == 1) return;
  run(test_devices(GetParam()), [&](Rank& rank) {
    const Tensor x = torch::randn({2, 2, 9, 9}, torch::kDouble);
    const Traffic traffic = traffic_of(net, x, rank, TensorRule::alternating);
    EXPECT_THAT(traffic.forward, ElementsAre(sends("conv2", {"allreduce"}), sends("fc", {"allreduce"})));
    EXPECT_THAT(traffic.backward, ElementsAre("allreduce"));  // before conv3
  });
}

// AlexNet as in 2012 (Krizhevsky et al., figure 2), small: conv2, conv4 and conv5 in two groups of channels.
Sequential two_towers() {
  const auto conv = [](int64_t in, int64_t out, int64_t groups) {
    return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).padding(1).groups(groups));
  };
  return Sequential({{"conv1", conv(1, 4, 1)},
                     {"relu1", torch::nn::ReLU()},
                     {"pool1", torch::nn::MaxPool2d(2)},
                     {"conv2", conv(4, 8, 2)},
                     {"relu2", torch::nn::ReLU()},
                     {"pool2", torch::nn::MaxPool2d(2)},
                     {"conv3", conv(8, 12, 1)},
                     {"relu3", torch::nn::ReLU()},
                     {"conv4", conv(12, 12, 2)},
                     {"relu4", torch::nn::ReLU()},
                     {"conv5", conv(12, 8, 2)},
                     {"relu5", torch::nn::ReLU()},
                     {"pool5", torch::nn::MaxPool2d(2)},
                     {"flatten", torch::nn::Flatten()},
                     {"fc6", torch::nn::Linear(8, 16)},
                     {"relu6", torch::nn::ReLU()},
                     {"fc7", torch::nn::Linear(16, 16)},
                     {"relu7", torch::nn::ReLU()},
                     {"fc8", torch::nn::Linear(16, 5)}});
}

TEST_P(ShardTrafficWorlds, TwoTowersCrossInTheThirdConvolutionAndTheLinearLayersAlone) {
  if (GetParam() == 3) GTEST_SKIP() << "two groups over three ranks";
  Sequential net = two_towers();
  expect_sharded_trains_as_whole(net, {1, 8, 8}, 5, GetParam());
  if (GetParam() != 2) return;
  run(test_devices(2), [&](Rank& rank) {
    const Traffic traffic = traffic_of(net, torch::randn({2, 1, 8, 8}, torch::kDouble), rank);
    EXPECT_THAT(traffic.forward,
                ElementsAre(sends("conv3", {"allgather"}), sends("fc6", {"allreduce"}), sends("fc8", {"allreduce"})));
    EXPECT_THAT(traffic.backward, ElementsAre("allreduce", "reduce_scatter"));  // before fc7, before conv3
  });
}

TEST_P(ShardTrafficWorlds, ResidualBlocksNeedOneSumEach) {
  Sequential net({{"conv1", torch::nn::Conv2d(1, 12, 3)},
                  {"norm1", torch::nn::BatchNorm2d(12)},
                  {"relu", torch::nn::ReLU()},
                  {"block1", ResidualBlock(12, 12)},
                  {"block2", ResidualBlock(12, 24, 2)},
                  {"pool", torch::nn::AdaptiveAvgPool2d(1)},
                  {"flatten", torch::nn::Flatten()},
                  {"fc", torch::nn::Linear(24, 5)}});
  expect_sharded_trains_as_whole(net, {1, 8, 8}, 5, GetParam());
  if (GetParam() == 1) return;
  run(test_devices(GetParam()), [&](Rank& rank) {
    const Traffic traffic = traffic_of(net, torch::randn({2, 1, 8, 8}, torch::kDouble), rank);
    EXPECT_THAT(traffic.forward, ElementsAre(sends("block1", {"allgather", "allreduce"}),
                                             sends("block2", {"allreduce"}), sends("fc", {"allgather"})));
    EXPECT_THAT(traffic.backward, ElementsAre("allreduce", "allreduce", "allreduce"));  // before fc, block2, block1
  });
}

// A residual block whose first layer is split by output and second by input.
struct ResidualMlpImpl : torch::nn::Cloneable<ResidualMlpImpl>, Shardable {
  ResidualMlpImpl(int64_t width, int64_t hidden) : width(width), hidden(hidden) { reset(); }
  void reset() override {
    up = register_module("up", torch::nn::Linear(width, hidden));
    down = register_module("down", torch::nn::Linear(hidden, width));
    norm = register_module("norm", torch::nn::BatchNorm1d(width));
  }
  Tensor forward(const Tensor& x) { return norm(down(torch::tanh(up(x)))) + x; }
  torch::nn::AnyModule shard(Rank& rank) const override;

  int64_t width, hidden;
  torch::nn::Linear up{nullptr}, down{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(ResidualMlp);

struct PartOfResidualMlp : torch::nn::Module {
  PartOfResidualMlp(const ResidualMlpImpl& whole, Rank& rank) : up(whole.up, rank), down(whole.down, rank) {
    norm = std::dynamic_pointer_cast<torch::nn::BatchNorm1dImpl>(whole.norm->clone(rank.device()));
    register_module("up", up);
    register_module("down", down);
    register_module("norm", norm);
  }
  Tensor forward(const Tensor& x) { return norm(down(torch::tanh(up(x)))) + x; }
  ColumnParallelLinear up;
  RowParallelLinear down;
  torch::nn::BatchNorm1d norm{nullptr};
};

torch::nn::AnyModule ResidualMlpImpl::shard(Rank& rank) const {
  return torch::nn::AnyModule(std::make_shared<PartOfResidualMlp>(*this, rank));
}

TEST_P(ShardTrafficWorlds, ShardableModulesBetweenSlicesTrainAsOnOneDevice) {
  Sequential net({{"fc1", torch::nn::Linear(6, 8)},
                  {"block1", ResidualMlp(8, 9)},
                  {"block2", ResidualMlp(8, 5)},
                  {"fc2", torch::nn::Linear(8, 4)}});
  expect_sharded_trains_as_whole(net, {6}, 4, GetParam());
  if (GetParam() == 1) return;
  run(test_devices(GetParam()), [&](Rank& rank) {
    const Traffic traffic = traffic_of(net, torch::randn({3, 6}, torch::kDouble), rank);
    EXPECT_THAT(traffic.forward, ElementsAre(sends("block1", {"allgather", "allreduce"}),
                                             sends("block2", {"allreduce"}), sends("fc2", {"allgather"})));
    EXPECT_THAT(traffic.backward, ElementsAre("allreduce", "allreduce", "allreduce"));
  });
}

}  // namespace shard_traffic_test
}  // namespace lockstep
