#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/checkpoint.hpp>

#include "error_of.hpp"
#include "io/safetensors.hpp"
#include "scratch_folder.hpp"

namespace lockstep {
namespace checkpoint_test {

using testing::AllOf;
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
  // What loading this into `net` says; whatever it is, `net` must not have changed.
  std::string load_error(const io::NamedTensors& tensors, Net& net) {
    io::write_safetensors(file(), tensors);
    auto before = values_of(*net);
    std::string error = error_of([&] { load_weights(file(), *net); });
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
  EXPECT_THAT(error_of([&] { save_weights(file(), *net, {{"data", "\xff"}}); }), HasSubstr("UTF-8"));
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

  EXPECT_THAT(load_error(with("table", torch::Tensor()), net),
              AllOf(HasSubstr(file().string()), HasSubstr("it lacks 'table'")));
  EXPECT_THAT(load_error(with("extra", torch::ones({2})), net), HasSubstr("it holds 'extra'"));
  EXPECT_THAT(load_error(with("block.norm.bias", torch::ones({3})), net),
              AllOf(HasSubstr("'block.norm.bias'"), HasSubstr("Float [3] in the file"), HasSubstr("Float [2] in the")));
  EXPECT_THAT(load_error(with("table", torch::ones({4}, torch::kInt)), net),
              AllOf(HasSubstr("'table'"), HasSubstr("Int [4] in the file"), HasSubstr("Long [4] in the module")));
  EXPECT_THAT(load_error(with("tied", torch::ones({3, 2})), net), HasSubstr("'tied'"));
}

TEST_F(CheckpointTest, RefusesADamagedFile) {
  Net net;
  auto before = values_of(*net);
  folder_.write("model.safetensors", "no tensors here at all");
  EXPECT_THAT(error_of([&] { load_weights(file(), *net); }), HasSubstr(file().string()));
  EXPECT_THAT(error_of([&] { load_weights(folder_ / "nothing", *net); }), HasSubstr("No such file"));
  expect_equal(values_of(*net), before);
}

TEST_F(CheckpointTest, RefusesAFlippedBitOfItsData) {
  Net source, net;
  save_weights(file(), *source);
  const std::string whole = folder_.read("model.safetensors");
  const auto before = values_of(*net);
  for (size_t from_end = 1; from_end <= 100; from_end += 3) {  // of its 108 bytes of data
    std::string bytes = whole;
    bytes[bytes.size() - from_end] ^= static_cast<char>(1 << from_end % 8);
    folder_.write("model.safetensors", bytes);
    EXPECT_THAT(error_of([&] { load_weights(file(), *net); }), AllOf(HasSubstr(file().string()), HasSubstr("SHA-256")));
  }
  expect_equal(values_of(*net), before);
}

TEST_F(CheckpointTest, KeepsTheOldFileWhenSavingFails) {
  Net net;
  save_weights(file(), *net);
  std::string before = folder_.read("model.safetensors");
  net->register_buffer("complex", torch::zeros({2}, torch::kComplexDouble));
  EXPECT_THAT(error_of([&] { save_weights(file(), *net); }), AllOf(HasSubstr("'complex'"), HasSubstr("ComplexDouble")));
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

}  // namespace checkpoint_test
}  // namespace lockstep
