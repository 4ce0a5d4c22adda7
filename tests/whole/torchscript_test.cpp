// A module of TorchScript within a module trains as any other one, on ranks and in a sharded net, and as on one device.
#include <gmock/gmock.h>
#include <torch/script.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/nn/weights.hpp>
#include <lockstep/trainer/fit.hpp>

#include "support/error_of.hpp"
#include "support/group_tests.hpp"
#include "support/scratch_folder.hpp"
#include "support/test_devices.hpp"

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace torchscript_test {

using namespace lockstep;
using testing::Contains;
using testing::Each;
using testing::HasSubstr;
using torch::Tensor;
namespace F = torch::nn::functional;

// It has a buffer, and a layer within a layer.
void write_script(const std::filesystem::path& file) {
  torch::manual_seed(1);
  const auto trained = torch::dtype(torch::kDouble).requires_grad(true);
  const auto unit = std::make_shared<torch::jit::CompilationUnit>();
  torch::jit::Module net("__torch__.Net", unit), layer("__torch__.Layer", unit);
  layer.register_parameter("weight", torch::randn({6, 4}, trained), /*is_buffer=*/false);
  layer.register_parameter("bias", torch::randn({6}, trained), false);
  layer.define("def forward(self, x):\n  return torch.tanh(torch.linear(x, self.weight, self.bias))\n");
  net.register_module("layer", layer);
  net.register_parameter("output", torch::randn({6, 3}, trained), false);
  net.register_attribute("training", c10::BoolType::get(), true);
  net.register_buffer("scale", torch::full({3}, 0.5, torch::kDouble));
  net.define(
      "def forward(self, x):\n"
      "  y = torch.mm(self.layer.forward(x), self.output)\n"
      "  if self.training:\n    y = y * 2\n"
      "  return y * self.scale + torch.sigmoid(y)\n");
  net.save(file.string());
}

struct Scripted : torch::nn::Module {
  explicit Scripted(torch::jit::Module of) : script(std::move(of)) {
    for (const auto& item : script.named_parameters(/*recurse=*/false)) register_parameter(item.name, item.value);
    for (const auto& item : script.named_buffers(/*recurse=*/false)) register_buffer(item.name, item.value);
    for (const auto& item : script.named_children()) register_module(item.name, std::make_shared<Scripted>(item.value));
  }
  void train(bool on = true) override {
    torch::nn::Module::train(on);
    script.train(on);
  }
  Tensor forward(const Tensor& x) { return script.forward({x}).toTensor(); }
  torch::jit::Module script;
};

Dataset samples() {
  torch::manual_seed(2);
  return {torch::randn({21, 4}, torch::kDouble), torch::arange(21) % 3};
}

const torch::optim::SGDOptions settings = torch::optim::SGDOptions(0.1).momentum(0.9);
constexpr int kEpochs = 4;

// TorchScript compiles anew after the first calls of a function, and these are more.
std::shared_ptr<Scripted> trained_on_one_device(const std::filesystem::path& file, const Dataset& data) {
  auto net = std::make_shared<Scripted>(torch::jit::load(file.string()));
  torch::optim::SGD sgd(net->parameters(), settings);
  for (int epoch = 1; epoch <= kEpochs; ++epoch) {
    for (auto& batch : batches(data, {.size = 5, .epoch = epoch})) {
      sgd.zero_grad();
      F::cross_entropy(net->forward(batch.x), batch.y).backward();
      sgd.step();
    }
  }
  return net;
}

void expect_same_weights(const torch::nn::Module& net, const torch::nn::Module& expected, const std::string& what) {
  ASSERT_EQ(net.parameters().size(), 3u);
  for (const auto& item : expected.named_parameters())
    expect_near(net.named_parameters()[item.key()].detach(), item.value().detach(), 1e-12, what + item.key());
}

class TorchScript : public Worlds {
 protected:
  TorchScript() { write_script(file_); }
  const ScratchFolder folder_;
  const std::filesystem::path file_ = folder_ / "net.pt";
  const Dataset data_ = samples();
};
INSTANTIATE_TEST_SUITE_P(Sizes, TorchScript, testing::Values(1, 2, 3),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

TEST_P(TorchScript, TrainsAsOnOneDevice) {
  const auto expected = trained_on_one_device(file_, data_);
  expected->eval();
  const Tensor evaluated = expected->forward(data_.x).detach();
  for (const auto sharded : {Sharded::nothing, Sharded::state, Sharded::gradients, Sharded::parameters}) {
    for (const int64_t grain : {0, 2}) {
      on_ranks([&](Rank& rank) {
        DataParallel net(Scripted(torch::jit::load(file_.string(), rank.device())), rank, {.sharded = sharded});
        Optimizer sgd(net, settings);
        for (int epoch = 1; epoch <= kEpochs; ++epoch) {
          for (auto& batch : batches(data_, {.size = 5, .epoch = epoch, .grain = grain}, rank)) {
            sgd.zero_grad();
            net.loss(batch, F::cross_entropy).backward();
            sgd.step();
          }
        }
        const Whole whole = net.whole();
        const std::string what = "stage " + std::to_string(static_cast<int>(sharded)) + ", ";
        expect_same_weights(*net, *expected, what);
        net.eval();
        EXPECT_FALSE(net->script.is_training());
        const torch::NoGradGuard no_grad;
        expect_near(net->script.forward({data_.x.to(rank.device())}).toTensor(), evaluated, 1e-12, what);
      });
    }
  }
}

TEST_P(TorchScript, Fits) {
  TrainOptions options;
  options.devices = test_devices(static_cast<size_t>(GetParam()));
  options.batch.size = 5;
  options.optimizer.momentum = 0.9;
  options.rate.lr = 0.1;
  options.epochs = kEpochs;
  options.keep.run_dir = folder_ / "run";
  fit({.name = "scripted",
       .module = [&] { return Scripted(torch::jit::load(file_.string())); },
       .criterion = F::cross_entropy,
       .train = data_},
      options);
  Scripted kept(torch::jit::load(file_.string()));
  load_weights(folder_ / "run/model.safetensors", kept);

  auto expected = std::make_shared<Scripted>(torch::jit::load(file_.string()));
  torch::optim::SGD sgd(expected->parameters(), settings);
  for (int epoch = 1; epoch <= kEpochs; ++epoch) {
    for (auto& batch : batches(data_, {.size = 5, .seed = options.seed, .epoch = epoch})) {
      sgd.zero_grad();
      F::cross_entropy(expected->forward(batch.x), batch.y).backward();
      sgd.step();
    }
  }
  expect_same_weights(kept, *expected, "");
}

// A user forgets them.
TEST(TorchScriptParameters, ThatAreNotRegisteredAreAWarning) {
  struct Forgotten : torch::nn::Module {
    explicit Forgotten(torch::jit::Module of) : script(std::move(of)) { to(torch::kDouble); }
    Tensor forward(const Tensor& x) { return head(script.forward({x}).toTensor()); }
    torch::jit::Module script;
    torch::nn::Linear head = register_module("head", torch::nn::Linear(3, 3));
  };
  const ScratchFolder folder;
  write_script(folder / "net.pt");
  const Dataset data = samples();
  std::vector<std::string> warnings;
  run(test_devices(2),
      [&](Rank& rank) {
        DataParallel net(Forgotten(torch::jit::load((folder / "net.pt").string(), rank.device())), rank);
        for (auto& batch : batches(data, {.size = 6}, rank)) net.loss(batch, F::cross_entropy).backward();
      },
      {.on_warning = [&](const std::string& text) { warnings.push_back(text); }});
  EXPECT_THAT(warnings, Contains(HasSubstr("Register it in the net with register_parameter()")));
}

}  // namespace torchscript_test
