// shard() and unshard() over 1 to 4 CPU ranks, against the net that was sharded: random nets under random rules, and
// nets of which it is known what they exchange.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/models.hpp>
#include <lockstep/residual_block.hpp>
#include <lockstep/tensor_parallel.hpp>

#include "error_of.hpp"
#include "group_tests.hpp"

#include <functional>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace lockstep {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using torch::Tensor;
using torch::nn::Sequential;
namespace F = torch::nn::functional;
using Calls = std::vector<std::string>;

constexpr double kTolerance = 1e-12;

// A net with the same weights, layer by layer under the same names.
Sequential copy_of(const Sequential& net) {
  Sequential copy;
  size_t i = 0;
  for (const auto& item : net->named_children()) {
    copy->push_back(item.key(), (net->begin() + static_cast<std::ptrdiff_t>(i++))->clone());
  }
  copy->train(net->is_training());
  return copy;
}

struct Batch {
  Tensor x, y;
};

// What training the net on one device gives.
struct Trained {
  std::vector<Tensor> results, input_gradients;
  std::vector<Sequential> gradients;  // nets whose .grad are those of each step
  Sequential net;
};

using Step = std::function<Tensor(const Tensor& x, const Tensor& y)>;  // the loss

Trained train_whole(const Sequential& start, const std::vector<Batch>& batches) {
  Trained trained;
  trained.net = copy_of(start);
  torch::optim::SGD sgd(trained.net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  for (const auto& batch : batches) {
    sgd.zero_grad();
    const Tensor x = batch.x.clone().requires_grad_();
    const Tensor result = trained.net->forward(x);
    F::cross_entropy(result, batch.y).backward();
    trained.results.push_back(result.detach());
    trained.input_gradients.push_back(x.grad());
    Sequential gradients = copy_of(trained.net);
    auto copies = gradients->named_parameters();
    for (auto& item : trained.net->named_parameters()) {
      copies[item.key()].mutable_grad() = item.value().grad().defined() ? item.value().grad().clone() : Tensor();
    }
    trained.gradients.push_back(gradients);
    sgd.step();
  }
  return trained;
}

void expect_whole_parameters_equal_on_all_ranks(const Sequential& part, Rank& rank) {
  std::set<std::string> split;
  for (const auto& item : part->named_modules()) {
    const auto* sliced = dynamic_cast<const Sliced*>(item.value().get());
    if (sliced == nullptr) continue;
    for (const auto& [name, dim] : sliced->sliced_dimensions()) split.insert(item.key() + "." + name);
  }
  for (const auto& item : part->named_parameters()) {
    if (split.contains(item.key())) continue;
    expect_equal_on_all_ranks(item.value(), rank, item.key());
    if (item.value().grad().defined()) expect_equal_on_all_ranks(item.value().grad(), rank, item.key() + ".grad");
  }
}

// Trains this rank's part of `start` in the same way, and compares everything.
void expect_trains_as_whole(const Sequential& start, const std::vector<Batch>& batches, const Trained& expected,
                            const ShardOptions& options, Rank& rank) {
  Sequential part = shard(start, rank, options);
  torch::optim::SGD sgd(part->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  Sequential joined = copy_of(start);
  for (size_t step = 0; step < batches.size(); ++step) {
    SCOPED_TRACE(testing::Message() << "step " << step);
    sgd.zero_grad();
    const Tensor x = batches[step].x.clone().requires_grad_();
    const Tensor result = part->forward(x);
    expect_near(result.detach(), expected.results[step], kTolerance, "result");
    F::cross_entropy(result, batches[step].y).backward();
    expect_near(x.grad(), expected.input_gradients[step], kTolerance, "gradient of the input");
    unshard_gradients(part, rank, joined);
    const auto gradients = expected.gradients[step]->named_parameters();
    for (const auto& item : joined->named_parameters()) {
      expect_near(item.value().grad(), gradients[item.key()].grad(), kTolerance, item.key() + ".grad");
    }
    expect_whole_parameters_equal_on_all_ranks(part, rank);
    sgd.step();
  }
  unshard(part, rank, joined);
  const auto weights = expected.net->named_parameters(), buffers = expected.net->named_buffers();
  for (const auto& item : joined->named_parameters()) {
    expect_near(item.value().detach(), weights[item.key()].detach(), kTolerance, item.key());
    expect_equal_on_all_ranks(item.value(), rank, item.key());
  }
  for (const auto& item : joined->named_buffers()) {
    expect_near(item.value().to(torch::kDouble), buffers[item.key()].to(torch::kDouble), kTolerance, item.key());
  }
}

std::vector<Batch> batches_of(at::IntArrayRef sample, int64_t classes, int count = 3) {
  auto shape = sample.vec();
  shape.insert(shape.begin(), 5);
  std::vector<Batch> batches;
  for (int i = 0; i < count; ++i) {
    batches.push_back({torch::randn(shape, torch::kDouble), torch::randint(classes, {5})});
  }
  return batches;
}

void expect_sharded_trains_as_whole(Sequential net, at::IntArrayRef sample, int64_t classes, int world,
                                    const ShardOptions& options = {}) {
  net->to(torch::kDouble);
  const auto batches = batches_of(sample, classes);
  const Trained expected = train_whole(net, batches);
  run(cpus(world), [&](Rank& rank) { expect_trains_as_whole(net, batches, expected, options, rank); });
}

class Worlds : public testing::TestWithParam<int> {
 protected:
  Worlds() { torch::manual_seed(GetParam()); }  // in every process the same
};
INSTANTIATE_TEST_SUITE_P(Sizes, Worlds, testing::Values(1, 2, 3, 4),
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
  ShardRule rule;

 private:
  int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_); }
  bool chance(int percent) { return pick(1, 100) <= percent; }

  template <class Layer>
  std::string add(const Layer& layer) {
    const std::string name = "layer" + std::to_string(net->size());
    net->push_back(std::string(name), layer);
    return name;
  }

  void split(const std::string& name, std::vector<LayerSplit> ways) {
    if (chance(30)) rule = rule.with(name, ways[pick(0, static_cast<int64_t>(ways.size()) - 1)]);
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
        split(add(torch::nn::Sigmoid()), {LayerSplit::whole});
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
    rule.convolutions_alternate = chance(50);
    for (int64_t convolutions = pick(1, 4); convolutions > 0 && size > 3; --convolutions) {
      const int64_t out = 12 * pick(1, 2);
      if (size >= 4 && chance(20)) {
        split(add(ConvReluPool(channels, out, 3)), {LayerSplit::output, LayerSplit::whole});
        size = (size - 2) / 2;
      } else {
        add_convolution(channels, out);
      }
      channels = out;
      if (chance(40)) split(add(torch::nn::BatchNorm2d(channels)), {LayerSplit::whole});
      add_activation();
      if (size > 3 && chance(30)) {
        add(torch::nn::MaxPool2d(2));
        size /= 2;
      }
    }
    split(add(torch::nn::Flatten()), {LayerSplit::whole});
    width_ = channels * size * size;
  }

  void add_convolution(int64_t channels, int64_t out) {
    const int64_t groups = channels % 12 == 0 && chance(40) ? std::vector<int64_t>{2, 3, 4, 12}[pick(0, 3)] : 1;
    const bool fits = groups % world_ == 0 || world_ % groups == 0;
    const auto options = torch::nn::Conv2dOptions(channels, out, 3).padding(1).bias(chance(70)).groups(groups);
    const auto name = add(torch::nn::Conv2d(options));
    if (!fits) {
      rule = rule.with(name, LayerSplit::whole);
    } else if (groups > 1 || channels % world_ != 0) {
      split(name, {LayerSplit::output, LayerSplit::whole});
    } else {
      split(name, {LayerSplit::output, LayerSplit::input, LayerSplit::whole});
    }
  }

  void add_linear(bool last) {
    const int64_t out = pick(4, 13);  // at least one unit for each of four ranks
    const auto name = add(torch::nn::Linear(torch::nn::LinearOptions(width_, out).bias(chance(80))));
    if (width_ < world_) {
      rule = rule.with(name, LayerSplit::output);
    } else {
      split(name, {LayerSplit::output, LayerSplit::input, LayerSplit::whole});
    }
    width_ = classes = out;
    if (last) return;
    if (chance(30)) split(add(torch::nn::BatchNorm1d(out)), {LayerSplit::whole});
    add_activation();
  }

  std::mt19937 random_;
  const int world_;
  int64_t width_ = 0;
};

TEST_P(Worlds, RandomNetsTrainAsOnOneDevice) {
  for (int round = 0; round < 25; ++round) {
    const RandomNet random(100 * GetParam() + round, GetParam());
    SCOPED_TRACE(testing::Message() << "round " << round << "\n" << random.net);
    expect_sharded_trains_as_whole(random.net, random.sample, random.classes, GetParam(), {.rule = random.rule});
  }
}

// ---- Nets of which it is known what they exchange
// --------------------------------------------------------------------

// What each layer's forward sends, and backward all together, for images or features that need no gradient.
struct Traffic {
  std::vector<std::pair<std::string, Calls>> forward;  // of the layers that send
  Calls backward;
};

Traffic traffic_of(const Sequential& net, const Tensor& x, Rank& rank, const ShardOptions& options = {}) {
  const auto calls = std::make_shared<Calls>();
  Rank group = counted(rank, calls);
  Sequential part = shard(net, group, options);
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

Sequential multilayer_perceptron() {
  return Sequential({{"fc1", torch::nn::Linear(7, 9)},
                     {"tanh1", torch::nn::Tanh()},
                     {"fc2", torch::nn::Linear(9, 8)},
                     {"tanh2", torch::nn::Tanh()},
                     {"fc3", torch::nn::Linear(8, 5)}});
}

TEST_P(Worlds, LinearLayersAlternateWithOneSumPerTwo) {
  Sequential net = multilayer_perceptron();
  expect_sharded_trains_as_whole(net, {7}, 5, GetParam());
  if (GetParam() == 1) return;
  run(cpus(GetParam()), [&](Rank& rank) {
    const Traffic traffic = traffic_of(net, torch::ones({2, 7}, torch::kDouble), rank);
    EXPECT_THAT(traffic.forward, ElementsAre(sends("fc2", {"allreduce"}), sends("fc3", {"allgather"})));
    EXPECT_THAT(traffic.backward, ElementsAre("allreduce"));  // before fc3
    const Traffic in_slices = traffic_of(net, torch::ones({2, 7}, torch::kDouble), rank, {.gather_output = false});
    EXPECT_THAT(in_slices.forward, ElementsAre(sends("fc2", {"allreduce"})));
  });
}

Sequential lenet_of_layers() {
  return Sequential({{"conv1", ConvReluPool(1, 12, 3)},
                     {"conv2", ConvReluPool(12, 24, 3)},
                     {"flatten", torch::nn::Flatten()},
                     {"fc1", torch::nn::Linear(24 * 2 * 2, 10)},
                     {"relu", torch::nn::ReLU()},
                     {"fc2", torch::nn::Linear(10, 6)}});
}

TEST_P(Worlds, ChannelsStaySlicesThroughFlatten) {
  Sequential net = lenet_of_layers();
  expect_sharded_trains_as_whole(net, {1, 14, 14}, 6, GetParam());
  if (GetParam() == 1) return;
  run(cpus(GetParam()), [&](Rank& rank) {
    const Traffic traffic = traffic_of(net, torch::ones({2, 1, 14, 14}, torch::kDouble), rank);
    EXPECT_THAT(traffic.forward,
                ElementsAre(sends("conv2", {"allgather"}), sends("fc1", {"allreduce"}), sends("fc2", {"allgather"})));
    EXPECT_THAT(traffic.backward, ElementsAre("allreduce", "reduce_scatter"));  // before fc2, before conv2
  });
}

TEST_P(Worlds, AlternatingConvolutionsNeedOneSumPerTwo) {
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
  const ShardOptions options{.rule = ShardRule::alternating()};
  expect_sharded_trains_as_whole(net, {2, 9, 9}, 5, GetParam(), options);
  if (GetParam() == 1) return;
  run(cpus(GetParam()), [&](Rank& rank) {
    const Tensor x = torch::randn({2, 2, 9, 9}, torch::kDouble);
    const Traffic traffic = traffic_of(net, x, rank, options);
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

TEST_P(Worlds, TwoTowersCrossInTheThirdConvolutionAndTheLinearLayersAlone) {
  if (GetParam() == 3) GTEST_SKIP() << "two groups over three ranks";
  Sequential net = two_towers();
  expect_sharded_trains_as_whole(net, {1, 8, 8}, 5, GetParam());
  if (GetParam() != 2) return;
  run(cpus(2), [&](Rank& rank) {
    const Traffic traffic = traffic_of(net, torch::randn({2, 1, 8, 8}, torch::kDouble), rank);
    EXPECT_THAT(traffic.forward,
                ElementsAre(sends("conv3", {"allgather"}), sends("fc6", {"allreduce"}), sends("fc8", {"allreduce"})));
    EXPECT_THAT(traffic.backward, ElementsAre("allreduce", "reduce_scatter"));  // before fc7, before conv3
  });
}

TEST_P(Worlds, ResidualBlocksNeedOneSumEach) {
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
  run(cpus(GetParam()), [&](Rank& rank) {
    const Traffic traffic = traffic_of(net, torch::randn({2, 1, 8, 8}, torch::kDouble), rank);
    EXPECT_THAT(traffic.forward, ElementsAre(sends("block1", {"allgather", "allreduce"}),
                                             sends("block2", {"allreduce"}), sends("fc", {"allgather"})));
    EXPECT_THAT(traffic.backward, ElementsAre("allreduce", "allreduce", "allreduce"));  // before fc, block2, block1
  });
}

TEST_P(Worlds, FrozenPartsOfResidualBlocksStayFrozen) {
  ResidualBlock block(12, 24);
  block->shortcut->parameters()[0].requires_grad_(false);
  block->norm2->bias.requires_grad_(false);
  Sequential net({{"block", block}});
  run(cpus(GetParam()), [&](Rank& rank) {
    const auto whole = net->named_parameters();
    for (const auto& item : shard(net, rank)->named_parameters()) {
      EXPECT_EQ(item.value().requires_grad(), whole[item.key()].requires_grad()) << item.key();
    }
  });
}

// The models that the program has, in small.
class Models : public Worlds {};
INSTANTIATE_TEST_SUITE_P(Sizes, Models, testing::Values(1, 2, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

TEST_P(Models, TrainAsOnOneDevice) {
  const std::vector<ModelOptions> list{{.name = "mlp", .width = 0.05},
                                       {.name = "alexnet", .width = 0.05, .image_size = 65},
                                       {.name = "alexnet", .width = 0.05, .image_size = 65, .groups = 2},
                                       {.name = "resnet18", .width = 0.125, .image_size = 16}};
  for (const auto& options : list) {
    SCOPED_TRACE(to_string(options));
    expect_sharded_trains_as_whole(make_model(options), {1, 28, 28}, 10, GetParam());
  }
  if (GetParam() <= 2) expect_sharded_trains_as_whole(make_model({.name = "lenet"}), {1, 28, 28}, 10, GetParam());
}

// ---- Modules of one's own, dropout, a split loss
// -----------------------------------------------------------------------

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

TEST_P(Worlds, ShardableModulesBetweenSlicesTrainAsOnOneDevice) {
  Sequential net({{"fc1", torch::nn::Linear(6, 8)},
                  {"block1", ResidualMlp(8, 9)},
                  {"block2", ResidualMlp(8, 5)},
                  {"fc2", torch::nn::Linear(8, 4)}});
  expect_sharded_trains_as_whole(net, {6}, 4, GetParam());
  expect_sharded_trains_as_whole(net, {6}, 4, GetParam(), {.rule = ShardRule().with("block1", LayerSplit::whole)});
  if (GetParam() == 1) return;
  run(cpus(GetParam()), [&](Rank& rank) {
    const Traffic traffic = traffic_of(net, torch::randn({3, 6}, torch::kDouble), rank);
    EXPECT_THAT(traffic.forward, ElementsAre(sends("block1", {"allgather", "allreduce"}),
                                             sends("block2", {"allreduce"}), sends("fc2", {"allgather"})));
    EXPECT_THAT(traffic.backward, ElementsAre("allreduce", "allreduce", "allreduce"));
  });
}

TEST_P(Worlds, DropoutIsTheSameOverAnyNumberOfRanks) {
  Sequential net({{"conv", torch::nn::Conv2d(1, 12, 3)},
                  {"drop_channels", torch::nn::Dropout2d(0.3)},
                  {"flatten", torch::nn::Flatten()},
                  {"fc1", torch::nn::Linear(12 * 4, 9)},
                  {"drop_whole", torch::nn::Dropout(0.4)},
                  {"fc2", torch::nn::Linear(9, 13)},
                  {"drop_slices", torch::nn::Dropout(0.5)},
                  {"fc3", torch::nn::Linear(13, 5)},
                  {"drop_kept_whole", torch::nn::Dropout(0.1)}});
  net->to(torch::kDouble);
  const Batch batch = batches_of({1, 4, 4}, 5, 1)[0];
  const auto trained = [&](Rank& rank) {
    Sequential part = shard(net, rank, {.rule = ShardRule().with("drop_kept_whole", LayerSplit::whole), .seed = 5});
    Sequential joined = copy_of(net);
    torch::optim::SGD sgd(part->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      sgd.zero_grad();
      F::cross_entropy(part->forward(batch.x), batch.y).backward();
      sgd.step();
    }
    unshard(part, rank, joined);
    return joined;
  };
  run(cpus(GetParam()), [&](Rank& rank) {
    Sequential alone;
    run(cpus(1), [&](Rank& one) { alone = trained(one); });
    Sequential together = trained(rank);
    const auto expected = alone->named_parameters();
    for (const auto& item : together->named_parameters()) {
      expect_near(item.value().detach(), expected[item.key()].detach(), kTolerance, item.key());
    }
  });
}

TEST_P(Worlds, DropoutSeedsComeFromRankZero) {
  Sequential net({{"drop", torch::nn::Dropout(0.5)}});
  run(cpus(GetParam()), [&](Rank& rank) {
    const Tensor y = shard(net, rank)->forward(torch::ones({100}));
    expect_equal_on_all_ranks(y, rank, "what is dropped");
  });
}

TEST_P(Worlds, ResultsInSlicesSuitTheParallelLoss) {
  Sequential net({{"fc1", torch::nn::Linear(6, 9)},
                  {"tanh", torch::nn::Tanh()},
                  {"fc2", torch::nn::Linear(9, 8)},
                  {"fc3", torch::nn::Linear(8, 11)}});
  net->to(torch::kDouble);
  const auto batches = batches_of({6}, 11, 1);
  const Trained expected = train_whole(net, batches);
  run(cpus(GetParam()), [&](Rank& rank) {
    Sequential part = shard(net, rank, {.gather_output = false});
    const Tensor x = batches[0].x.clone().requires_grad_();
    parallel_cross_entropy(part->forward(x), batches[0].y, rank, 11).backward();
    expect_near(x.grad(), expected.input_gradients[0], kTolerance, "gradient of the input");
    Sequential joined = copy_of(net);
    unshard_gradients(part, rank, joined);
    const auto gradients = expected.gradients[0]->named_parameters();
    for (const auto& item : joined->named_parameters()) {
      expect_near(item.value().grad(), gradients[item.key()].grad(), kTolerance, item.key());
    }
  });
}

TEST_P(Worlds, PartsTakeOverNamesTypesFrozenWeightsAndMode) {
  Sequential net = lenet_of_layers();
  for (auto& item : net->named_parameters()) {
    if (item.key().starts_with("conv1") || item.key() == "fc2.bias") item.value().requires_grad_(false);
  }
  net->eval();
  run(cpus(GetParam()), [&](Rank& rank) {
    Sequential part = shard(net, rank, {.rule = ShardRule().with("fc2", LayerSplit::whole)});
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

std::string error_of_shard(const Sequential& net, int world, const ShardRule& rule = {}) {
  return error_of([&] { run(cpus(world), [&](Rank& rank) { shard(net, rank, {.rule = rule}); }); });
}

TEST(ShardTest, WhatCannotBeSplitIsAnErrorWithTheLayersName) {
  EXPECT_THAT(error_of_shard(lenet_of_layers(), 5),
              AllOf(HasSubstr("layer conv1"), HasSubstr("12 output channels"), HasSubstr("1, 2, 3, 4, 6, 12")));
  EXPECT_THAT(error_of_shard(multilayer_perceptron(), 6), AllOf(HasSubstr("layer fc3"), HasSubstr("size 5")));
  Sequential unknown({{"fc", torch::nn::Linear(4, 4)}, {"softmax", torch::nn::Softmax(1)}});
  EXPECT_THAT(error_of_shard(unknown, 2), AllOf(HasSubstr("layer softmax"), HasSubstr("torch::nn::SoftmaxImpl"),
                                                HasSubstr("LayerSplit::whole"), HasSubstr("Shardable")));
  EXPECT_EQ(error_of_shard(unknown, 2, ShardRule().with("softmax", LayerSplit::whole)), "(no error)");
  EXPECT_THAT(error_of_shard(Sequential(), 1), HasSubstr("no layers"));
}

TEST(ShardTest, RulesThatTheNetCannotFollowAreErrors) {
  const auto rule = [](const char* layer, LayerSplit split) { return ShardRule().with(layer, split); };
  EXPECT_THAT(error_of_shard(multilayer_perceptron(), 2, rule("fc9", LayerSplit::input)),
              AllOf(HasSubstr("fc9"), HasSubstr("fc1, tanh1, fc2, tanh2, fc3")));
  EXPECT_THAT(error_of_shard(multilayer_perceptron(), 2, rule("tanh1", LayerSplit::input)),
              AllOf(HasSubstr("layer tanh1"), HasSubstr("by input")));
  EXPECT_THAT(error_of_shard(lenet_of_layers(), 2, rule("conv2", LayerSplit::input)), HasSubstr("by input"));

  struct Fixed : torch::nn::Module {
    Tensor forward(const Tensor& x) { return x; }
  };
  Sequential net({{"fixed", torch::nn::AnyModule(std::make_shared<Fixed>())}});
  EXPECT_THAT(error_of_shard(net, 1, rule("fixed", LayerSplit::whole)),
              AllOf(HasSubstr("layer fixed"), HasSubstr("Cloneable")));
}

TEST(ShardTest, UnshardNeedsANetLikeTheOneThatWasSharded) {
  const auto error = [](const Sequential& other) {
    return error_of([&] {
      run(cpus(2), [&](Rank& rank) {
        Sequential net = copy_of(other);
        unshard(shard(multilayer_perceptron(), rank), rank, net);
      });
    });
  };
  EXPECT_EQ(error(multilayer_perceptron()), "(no error)");
  EXPECT_THAT(error(lenet_of_layers()), HasSubstr("conv1.weight"));
  EXPECT_THAT(error(Sequential({{"fc1", torch::nn::Linear(6, 9)}})), AllOf(HasSubstr("[9, 6]"), HasSubstr("[9, 7]")));
}

}  // namespace
}  // namespace lockstep
