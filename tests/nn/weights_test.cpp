#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/nn/tensor_files.hpp>
#include <lockstep/nn/weights.hpp>

#include "io/safetensors.hpp"
#include "support/error_of.hpp"
#include "support/scratch_folder.hpp"
#include "support/small_nets.hpp"
#include "support/test_devices.hpp"

#include <functional>
#include <memory>

namespace lockstep {
namespace weights_test {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::UnorderedElementsAre;

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    linear = register_module("linear", torch::nn::Linear(3, 2));
    norm = register_module("norm", torch::nn::BatchNorm1d(2));
  }
  torch::nn::Linear linear{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Block);

// A module with parameters at several depths, buffers, and one tensor under two names.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    scale = register_parameter("scale", torch::randn({}));
    block = register_module("block", Block());
    table = register_buffer("table", torch::randint(0, 100, {4}, torch::kLong));
    tied = register_parameter("tied", block->linear->weight);
  }
  torch::Tensor scale, table, tied;
  Block block{nullptr};
};
TORCH_MODULE(Net);

std::vector<torch::Tensor> values_of(const torch::nn::Module& module) {
  std::vector<torch::Tensor> values;
  for (const auto& tensor : module.parameters()) values.push_back(tensor.detach().clone());
  for (const auto& tensor : module.buffers()) values.push_back(tensor.clone());
  return values;
}

void expect_equal(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(torch::equal(a[i], b[i])) << i;
}

class CheckpointTest : public testing::Test {
 protected:
  std::filesystem::path file() const { return folder_ / "model.safetensors"; }
  // Gives what loading these tensors into `net` says; in any case `net` must not have changed.
  Caught load_error(const io::NamedTensors& tensors, Net& net) {
    io::write_safetensors(file(), tensors);
    auto before = values_of(*net);
    auto error = error_of([&] { load_weights(file(), *net); });
    expect_equal(values_of(*net), before);
    return error;
  }
  ScratchFolder folder_;
};

TEST_F(CheckpointTest, GivesBackWhatItSaved) {
  Net net, other;
  net->block->norm->running_mean.fill_(3);
  net->block->norm->num_batches_tracked.fill_(17);
  save_weights(file(), *net);
  load_weights(file(), *other);
  expect_equal(values_of(*other), values_of(*net));
  EXPECT_TRUE(other->tied.is_same(other->block->linear->weight));
  EXPECT_TRUE(other->scale.requires_grad());
  EXPECT_TRUE(other->scale.is_leaf());
}

TEST_F(CheckpointTest, UsesPyTorchsNamesAndWritesASharedTensorOnce) {
  save_weights(file(), *Net());
  std::vector<std::string> names;
  for (const auto& [name, tensor] : io::read_safetensors(file())) names.push_back(name);
  EXPECT_THAT(names, UnorderedElementsAre("scale", "tied", "block.linear.bias", "block.norm.weight", "block.norm.bias",
                                          "table", "block.norm.running_mean", "block.norm.running_var",
                                          "block.norm.num_batches_tracked"));
}

TEST_F(CheckpointTest, KeepsMetadataBesidePyTorchs) {
  Net net, other;
  save_weights(file(), *net, {{"data", "synthetic"}});
  EXPECT_THAT(folder_.read("model.safetensors"), HasSubstr(R"("__metadata__":{"format":"pt","data":"synthetic",)"));
  load_weights(file(), *other);
  expect_equal(values_of(*other), values_of(*net));
  EXPECT_THAT(error_of([&] { save_weights(file(), *net, {{"data", "\xff"}}); }), Fails(Error::file));
}

TEST_F(CheckpointTest, AcceptsASharedTensorUnderEitherNameOrBoth) {
  Net source;
  io::NamedTensors all;
  for (const auto& item : source->named_parameters()) all.emplace_back(item.key(), item.value());
  for (const auto& item : source->named_buffers()) all.emplace_back(item.key(), item.value());
  for (const std::string left_out : {"", "tied", "block.linear.weight"}) {
    io::NamedTensors some;
    for (const auto& entry : all) {
      if (entry.first != left_out) some.push_back(entry);
    }
    io::write_safetensors(file(), some);
    Net net;
    load_weights(file(), *net);
    expect_equal(values_of(*net), values_of(*source));
  }
}

TEST_F(CheckpointTest, ChangesNothingWhenAnythingIsWrong) {
  Net net;
  io::NamedTensors good;
  for (const auto& item : Net()->named_parameters()) good.emplace_back(item.key(), item.value());
  for (const auto& item : net->named_buffers()) good.emplace_back(item.key(), item.value());
  auto with = [&](const std::string& name, const torch::Tensor& tensor) {
    io::NamedTensors result;
    bool known = false;
    for (auto entry : good) {
      if (entry.first == name) known = true, entry.second = tensor;
      if (entry.second.defined()) result.push_back(entry);
    }
    if (!known) result.emplace_back(name, tensor);
    return result;
  };

  EXPECT_THAT(load_error(with("table", torch::Tensor()), net), Fails(Error::file));
  EXPECT_THAT(load_error(with("extra", torch::ones({2})), net), Fails(Error::file));
  EXPECT_THAT(load_error(with("block.norm.bias", torch::ones({3})), net), Fails(Error::file));
  EXPECT_THAT(load_error(with("table", torch::ones({4}, torch::kInt)), net), Fails(Error::file));
  EXPECT_THAT(load_error(with("tied", torch::ones({3, 2})), net), Fails(Error::file));
}

TEST_F(CheckpointTest, LeavesOutWhatDoesNotMatchIfAsked) {
  Net source, net;
  const auto before = values_of(*net);
  save_tensors(file(), {{"scale", source->scale}, {"head.weight", torch::ones({2})}, {"head.bias", torch::ones({1})}});
  const auto names = load_weights(file(), *net, /*strict=*/false);
  EXPECT_THAT(names.missing,
              UnorderedElementsAre("tied", "block.linear.weight", "block.linear.bias", "block.norm.weight",
                                   "block.norm.bias", "table", "block.norm.running_mean", "block.norm.running_var",
                                   "block.norm.num_batches_tracked"));
  EXPECT_THAT(names.unexpected, UnorderedElementsAre("head.weight", "head.bias"));
  EXPECT_TRUE(torch::equal(net->scale, source->scale));
  const auto after = values_of(*net);
  for (size_t i = 1; i < after.size(); ++i) EXPECT_TRUE(torch::equal(after[i], before[i])) << i;  // all but scale

  save_weights(file(), *source);
  const auto all = load_weights(file(), *net, /*strict=*/false);
  EXPECT_TRUE(all.missing.empty() && all.unexpected.empty());
  expect_equal(values_of(*net), values_of(*source));
  save_tensors(file(), {{"scale", torch::ones({2})}});
  EXPECT_THAT(error_of([&] { load_weights(file(), *net, /*strict=*/false); }), Fails(Error::file));
  expect_equal(values_of(*net), values_of(*source));
}

TEST_F(CheckpointTest, KeepsAnyTensorsByName) {
  const Dataset::Tensors tensors{{"mean", torch::randn({2, 3}, torch::kDouble)},
                                 {"every other", torch::arange(10).slice(0, 0, 10, 2)},
                                 {"flag", torch::tensor(true)},
                                 {"none", torch::empty({0, 4}, torch::kHalf)}};
  save_tensors(file(), tensors, {{"made by", "a test"}});
  const Dataset::Tensors read = load_tensors(file());
  ASSERT_EQ(read.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    EXPECT_TRUE(torch::equal(read.at(name), tensor)) << name;
    EXPECT_EQ(read.at(name).scalar_type(), tensor.scalar_type()) << name;
  }
  EXPECT_THAT(folder_.read("model.safetensors"), HasSubstr(R"("made by":"a test")"));
  EXPECT_THAT(error_of([&] { save_tensors(file(), {{"gone", torch::Tensor()}}); }), Refused());
  std::string bytes = folder_.read("model.safetensors");
  bytes.back() ^= 1;
  folder_.write("model.safetensors", bytes);
  EXPECT_NE(error_of([&] { load_tensors(file()); }), "(no error)");
}

TEST_F(CheckpointTest, RefusesADamagedFile) {
  Net net;
  auto before = values_of(*net);
  folder_.write("model.safetensors", "no tensors here at all");
  EXPECT_THAT(error_of([&] { load_weights(file(), *net); }), Fails(Error::file));
  EXPECT_THAT(error_of([&] { load_weights(folder_ / "nothing", *net); }), Fails(Error::file));
  expect_equal(values_of(*net), before);
}

TEST_F(CheckpointTest, RefusesAFlippedBitOfItsData) {
  Net source, net;
  save_weights(file(), *source);
  const std::string whole = folder_.read("model.safetensors");
  const auto before = values_of(*net);
  for (size_t from_end = 1; from_end <= 100; from_end += 3) {  // the file has 108 bytes of data
    std::string bytes = whole;
    bytes[bytes.size() - from_end] ^= static_cast<char>(1 << from_end % 8);
    folder_.write("model.safetensors", bytes);
    EXPECT_THAT(error_of([&] { load_weights(file(), *net); }), Fails(Error::file));
  }
  expect_equal(values_of(*net), before);
}

TEST_F(CheckpointTest, KeepsTheOldFileWhenSavingFails) {
  Net net;
  save_weights(file(), *net);
  std::string before = folder_.read("model.safetensors");
  net->register_buffer("complex", torch::zeros({2}, torch::kComplexDouble));
  EXPECT_THAT(error_of([&] { save_weights(file(), *net); }), Fails(Error::file));
  EXPECT_EQ(folder_.read("model.safetensors"), before);
  EXPECT_THAT(folder_.names(), ElementsAre("model.safetensors"));
}

TEST_F(CheckpointTest, LoadsThroughOptimisersAndGradients) {
  torch::nn::Linear net(2, 1), other(2, 1);
  net->forward(torch::ones({1, 2})).sum().backward();
  save_weights(file(), *other);
  load_weights(file(), *net);
  EXPECT_TRUE(torch::equal(net->weight, other->weight));
  EXPECT_TRUE(net->weight.grad().defined());
}

// ---- Optimizers.

namespace optim = torch::optim;

// Matrices decay, the rest does not: a learning rate and a decay for each group.
Optimizer::Groups matrices_and_others(const torch::nn::Module& module) {
  const std::vector<torch::Tensor> matrices{static_cast<const NetImpl&>(module).tied};  // under two names
  std::vector<torch::Tensor> others;
  for (const auto& parameter : module.parameters()) {
    if (parameter.dim() < 2) others.push_back(parameter);
  }
  Optimizer::Groups groups{optim::OptimizerParamGroup(matrices), optim::OptimizerParamGroup(others)};
  groups[0].set_options(std::make_unique<optim::AdamWOptions>(optim::AdamWOptions(0.1).weight_decay(0.3)));
  groups[1].set_options(std::make_unique<optim::AdamWOptions>(optim::AdamWOptions(0.02)));
  return groups;
}

// A net with its optimizer, on one device.
struct Trained {
  explicit Trained(Rank& rank, bool adam = true)
      : module(rank.in_turn([] { return Net(); })),
        net(module, rank),
        optimizer(adam ? Optimizer(net, optim::AdamWOptions(0.1), matrices_and_others)
                       : Optimizer(net, optim::SGDOptions(0.1).momentum(0.9))) {}

  void step(int number) {
    const auto x = torch::sin(torch::arange(12).view({4, 3}) + number);
    optimizer.zero_grad();
    net.mean((module->block->norm(module->block->linear(x)) - module->scale).pow(2).sum() + module->scale.exp(), 4, 4)
        .backward();
    optimizer.step();
  }

  Net module;
  DataParallel<NetImpl> net;
  Optimizer optimizer;
};

void on_one_device(const std::function<void(Rank& rank)>& work) {
  run({torch::kCPU}, work);
}

TEST_F(CheckpointTest, AnOwnLoopGoesOnWithTheSameBits) {
  on_one_device([&](Rank& rank) {
    Trained expected(rank);
    save_weights(file(), *expected.module);
    auto goes_on = std::make_unique<Trained>(rank);
    load_weights(file(), *goes_on->module);
    for (int number = 1; number <= 6; ++number) {
      if (number == 4) {
        save_weights(file(), *goes_on->module);
        goes_on->optimizer.save(folder_ / "adamw");
        goes_on = std::make_unique<Trained>(rank);
        load_weights(file(), *goes_on->module);
        goes_on->optimizer.load(folder_ / "adamw");
      }
      expected.step(number);
      goes_on->step(number);
      expect_equal(values_of(*goes_on->module), values_of(*expected.module));
    }
  });
}

TEST_F(CheckpointTest, NamesAnOptimizersStateByMemberAndParameter) {
  on_one_device([&](Rank& rank) {
    Trained trained(rank);
    trained.step(1);
    trained.optimizer.save(file());
  });
  std::vector<std::string> names;
  for (const auto& [name, tensor] : io::read_safetensors(file())) {
    if (name.starts_with("exp_avg.")) names.push_back(name);
  }
  EXPECT_THAT(names, UnorderedElementsAre("exp_avg.scale", "exp_avg.tied", "exp_avg.block.linear.bias",
                                          "exp_avg.block.norm.weight", "exp_avg.block.norm.bias"));
}

TEST_F(CheckpointTest, RefusesAnotherOptimizersStateAndChangesNothing) {
  on_one_device([&](Rank& rank) {
    Trained adamw(rank), sgd(rank, /*adam=*/false);
    adamw.step(1);
    sgd.step(1);
    const auto state_now = [&] {
      adamw.optimizer.save(folder_ / "now");
      return folder_.read("now");
    };
    const auto before = state_now();
    const auto refused = [&] {
      const auto error = error_of([&] { adamw.optimizer.load(file()); });
      EXPECT_THAT(error, Fails(Error::file));
      EXPECT_EQ(state_now(), before);
      return error;
    };
    sgd.optimizer.save(file());
    EXPECT_NE(refused(), "(no error)");                           // other options, and momentum_buffer
    io::write_safetensors(file(), io::read_safetensors(file()));  // without the options
    EXPECT_THAT(refused(), Fails(Error::file));
    save_weights(file(), *adamw.module);
    EXPECT_THAT(refused(), Fails(Error::file));

    const auto with = [&](const std::string& name, const torch::Tensor& tensor) {
      io::NamedTensors tensors;
      for (const auto& entry : io::read_safetensors(folder_ / "now")) {
        if (entry.first != name) tensors.push_back(entry);
      }
      tensors.emplace_back(name, tensor);
      io::write_safetensors(file(), tensors);
    };
    with("exp_avg.tied", torch::ones({3, 3}));
    EXPECT_THAT(refused(), Fails(Error::file));
    with("exp_avg.block.other", torch::ones({2}));
    EXPECT_THAT(refused(), Fails(Error::file));
    with("momentum_buffer.tied", torch::ones({2, 3}));
    EXPECT_THAT(refused(), Fails(Error::file));

    std::string bytes = before;
    bytes[bytes.size() - 5] ^= 4;
    folder_.write("model.safetensors", bytes);
    EXPECT_THAT(refused(), Fails(Error::file));
  });
}

std::shared_ptr<torch::nn::LinearImpl> double_linear() {
  const auto linear = std::make_shared<torch::nn::LinearImpl>(5, 3);
  linear->to(torch::kDouble);
  const torch::NoGradGuard no_grad;
  for (auto& parameter : linear->parameters()) {
    parameter.copy_(torch::arange(parameter.numel()).view(parameter.sizes()) * 0.1);
  }
  return linear;
}

// Rank by rank other samples, of which all together are the same whatever the number of ranks.
void steps(DataParallel<torch::nn::LinearImpl>& net, Optimizer& optimizer, Rank& rank,
           const std::vector<int>& numbers) {
  for (const int number : numbers) {
    const Dataset data{torch::sin(torch::arange(30).view({6, 5}).to(torch::kDouble) * number), torch::arange(6) % 3};
    for (auto& batch : batches(data, {.size = 6}, rank)) {
      optimizer.zero_grad();
      net.loss(batch, torch::nn::functional::cross_entropy).backward();
      optimizer.step();
    }
  }
}

// The same of one device, without lockstep.
void whole_step(torch::nn::LinearImpl& net, optim::Optimizer& optimizer, int number) {
  const auto x = torch::sin(torch::arange(30).view({6, 5}).to(torch::kDouble) * number);
  optimizer.zero_grad();
  torch::nn::functional::cross_entropy(net.forward(x), torch::arange(6) % 3).backward();
  optimizer.step();
}

TEST_F(CheckpointTest, AShardedNetsOptimizerGoesOnInAnotherLayoutAndOnOneDevice) {
  const optim::AdamWOptions options(0.1);
  const auto expected = double_linear();
  optim::AdamW whole(expected->parameters(), options);
  for (const int number : {1, 2, 3, 4}) whole_step(*expected, whole, number);

  run(test_devices(3), [&](Rank& rank) {
    const auto linear = double_linear();
    DataParallel net(linear, rank, {.bucket_bytes = 64, .sharded = Sharded::state});
    Optimizer adamw(net, options);
    steps(net, adamw, rank, {1, 2});
    adamw.save(folder_ / "adamw");
    if (rank.index() == 0) save_weights(file(), *linear);
  });
  const auto kept = io::read_safetensors(folder_ / "adamw");
  EXPECT_EQ(kept.size(), 6u);  // exp_avg, exp_avg_sq and step, of weight and bias
  for (const auto& [ranks, sharded] : {std::pair(2, Sharded::gradients), std::pair(3, Sharded::parameters),
                                       std::pair(2, Sharded::nothing), std::pair(1, Sharded::nothing)}) {
    const auto layout = sharded;
    run(test_devices(ranks), [&](Rank& rank) {
      const auto linear = double_linear();
      load_weights(file(), *linear);
      DataParallel net(linear, rank, {.sharded = layout});
      Optimizer adamw(net, options);
      adamw.load(folder_ / "adamw");
      adamw.save(folder_ / "again");
      if (rank.index() == 0) {
        const auto again = load_tensors(folder_ / "again");
        ASSERT_EQ(again.size(), kept.size());
        for (const auto& [name, tensor] : kept) EXPECT_TRUE(torch::equal(again.at(name), tensor)) << name;
      }
      steps(net, adamw, rank, {3, 4});
      const auto all = net.whole();
      EXPECT_TRUE(torch::allclose(linear->weight.cpu(), expected->weight, 0, 1e-12));
      EXPECT_TRUE(torch::allclose(linear->bias.cpu(), expected->bias, 0, 1e-12));
    });
  }
}

TEST_F(CheckpointTest, AShardedNetsOptimizerNamesTheFileThatItRefuses) {
  io::write_safetensors(file(), {{"exp_avg.weight", torch::ones({3, 4})}});
  EXPECT_THAT(error_of([&] {
                run(test_devices(1), [&](Rank& rank) {
                  DataParallel net(double_linear(), rank, {.sharded = Sharded::state});
                  Optimizer(net, optim::SGDOptions(0.1)).load(file());
                });
              }),
              Fails(Error::file));
}

TEST(WeightsHash, ChangesWithABitANameAndAType) {
  Net net;
  const std::string hash = weights_hash(*net);
  EXPECT_THAT(hash, testing::MatchesRegex("[0-9a-f]{16}"));
  EXPECT_EQ(weights_hash(*net), hash);
  const torch::NoGradGuard no_grad;
  const auto last_bit = [](const torch::Tensor& tensor) { tensor.view(torch::kInt).view({-1})[0].bitwise_xor_(1); };
  for (const auto& tensor : {net->tied, net->scale, net->block->norm->running_var}) {
    last_bit(tensor);
    EXPECT_NE(weights_hash(*net), hash);
    last_bit(tensor);
    EXPECT_EQ(weights_hash(*net), hash);
  }
  net->table[3] += 1;
  EXPECT_NE(weights_hash(*net), hash);

  const auto of = [](const std::string& name, const torch::Tensor& tensor) {
    torch::nn::Module module;
    module.register_buffer(name, tensor);
    return weights_hash(module);
  };
  const torch::Tensor zeros = torch::zeros({2, 3});
  EXPECT_EQ(of("a", zeros), of("a", zeros.clone()));
  EXPECT_NE(of("a", zeros), of("b", zeros));
  EXPECT_NE(of("a", zeros), of("a", zeros.view({3, 2})));
  EXPECT_NE(of("a", zeros), of("a", zeros.to(torch::kInt)));
}

TEST_F(CheckpointTest, ANetworkThatWasReadAgainHasTheSameHash) {
  Net net, other;
  save_weights(file(), *net, {{"data", "synthetic"}});
  EXPECT_NE(weights_hash(*other), weights_hash(*net));
  load_weights(file(), *other);
  EXPECT_EQ(weights_hash(*other), weights_hash(*net));
}

TEST(WeightsHash, DoesNotSeeTheMemoryFormat) {
  torch::nn::Sequential net(torch::nn::Conv2d(3, 4, 3), torch::nn::BatchNorm2d(4));
  const std::string hash = weights_hash(*net);
  for (auto& parameter : net->parameters()) {
    if (parameter.dim() == 4) parameter.set_data(parameter.contiguous(torch::MemoryFormat::ChannelsLast));
  }
  EXPECT_FALSE(net->parameters()[0].is_contiguous());
  EXPECT_EQ(weights_hash(*net), hash);
}

}  // namespace weights_test
}  // namespace lockstep
