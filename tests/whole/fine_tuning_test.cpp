// Labels: concurrency 3x3
// The program of docs/guide/fine-tuning.md: weights from a file, features that are frozen and later not, groups with
// rates of their own, LibTorch's StepLR and an average of the weights, against plain LibTorch in float64.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/lab/weight_average.hpp>
#include <lockstep/lockstep.hpp>

#include "support/group_tests.hpp"
#include "support/scratch_folder.hpp"

#include <memory>
#include <string>
#include <vector>

namespace lockstep {
namespace fine_tuning_test {

using testing::ElementsAre;
using torch::Tensor;
namespace F = torch::nn::functional;
namespace nn = torch::nn;
namespace optim = torch::optim;

constexpr int kFrozen = 2, kEpochs = 5;
constexpr double kDecay = 0.9;

struct FeaturesImpl : nn::Module {
  Tensor forward(const Tensor& x) { return torch::tanh(second(torch::tanh(first(x)))); }
  nn::Linear first = register_module("first", nn::Linear(6, 9)), second = register_module("second", nn::Linear(9, 7));
};
TORCH_MODULE(Features);

struct Pretrained : nn::Module {
  Pretrained() { to(torch::kDouble); }
  Features features = register_module("features", Features());
  nn::Linear head = register_module("head", nn::Linear(7, 8));
};

struct Tuned : nn::Module {
  Tuned() { to(torch::kDouble); }
  Tensor forward(const Tensor& x) { return new_head(features(x)); }
  void freeze(bool frozen) {
    for (auto& parameter : features->parameters()) parameter.requires_grad_(!frozen);
  }
  Features features = register_module("features", Features());
  nn::Linear new_head = register_module("new_head", nn::Linear(7, 3));
};

std::shared_ptr<Tuned> make_net() {
  torch::manual_seed(2);
  return std::make_shared<Tuned>();
}

Optimizer::Groups two_groups(const nn::Module& module) {
  const auto& net = dynamic_cast<const Tuned&>(module);
  Optimizer::Groups groups;
  groups.emplace_back(net.features->parameters());
  groups.emplace_back(net.new_head->parameters());
  return groups;
}

const Dataset kData{torch::arange(26 * 6, torch::kDouble).sin().view({26, 6}), torch::arange(26) % 3};

// Weights and their averages, by the parameters' order.
struct Tunings {
  std::vector<Tensor> weights, averages;
};

Tunings by_libtorch(const std::filesystem::path& file) {
  const auto net = make_net();
  load_weights(file, *net, false);
  optim::SGD sgd(two_groups(*net), optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
  sgd.param_groups()[0].options().set_lr(0.02);
  optim::StepLR rate(sgd, 2, 0.5);
  Tunings tunings{.weights = net->parameters(), .averages = {}};
  net->freeze(true);
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    if (epoch == kFrozen) net->freeze(false);
    for (const auto& batch : batches(kData, {.size = 8, .epoch = epoch})) {
      sgd.zero_grad();
      F::cross_entropy(net->forward(batch.x), batch.y).backward();
      sgd.step();
      for (size_t i = 0; i < tunings.weights.size(); ++i) {
        const Tensor weight = tunings.weights[i].detach();
        if (tunings.averages.size() == i) tunings.averages.push_back(weight.clone());
        tunings.averages[i] = tunings.averages[i] * kDecay + weight * (1 - kDecay);
      }
    }
    rate.step();
  }
  return tunings;
}

void expect_near(const Tuned& net, const std::vector<Tensor>& expected, const std::string& what) {
  const auto items = net.named_parameters().pairs();
  for (size_t i = 0; i < items.size(); ++i)
    lockstep::expect_near(items[i].second, expected[i], 1e-12, what + ", " + items[i].first);
}

using FineTuningWorlds = Worlds;
INSTANTIATE_TEST_SUITE_P(Sizes, FineTuningWorlds, testing::Values(1, 2, 3),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

TEST_P(FineTuningWorlds, IsThatOfPlainLibTorch) {
  const ScratchFolder folder;  // each process has its own
  torch::manual_seed(1);
  save_weights(folder / "pretrained", Pretrained());
  const Tunings expected = by_libtorch(folder / "pretrained");
  for (const Sharded sharded : {Sharded::nothing, Sharded::state, Sharded::gradients, Sharded::parameters}) {
    const std::string what = "stage " + std::to_string(static_cast<int>(sharded));
    on_ranks([&](Rank& rank) {
      const auto module = rank.in_turn([] { return make_net(); });
      const UnmatchedNames unmatched = load_weights(folder / "pretrained", *module, /*strict=*/false);
      EXPECT_THAT(unmatched.missing, ElementsAre("new_head.weight", "new_head.bias"));
      EXPECT_THAT(unmatched.unexpected, ElementsAre("head.bias", "head.weight"));

      DataParallel<Tuned> net(module, rank, {.sharded = sharded});
      Optimizer sgd(net, optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01), two_groups);
      sgd.param_groups()[0].options().set_lr(0.02);
      auto rate = sgd.scheduler<optim::StepLR>(2, 0.5);
      WeightAverage average(net, kDecay);
      module->freeze(true);
      for (int epoch = 0; epoch < kEpochs; ++epoch) {
        if (epoch == kFrozen) module->freeze(false);
        for (auto& batch : batches(kData.to(rank.device()), {.size = 8, .epoch = epoch}, rank)) {
          sgd.zero_grad();
          net.loss(batch, F::cross_entropy).backward();
          sgd.step();
          average.add();
        }
        rate.step();
      }
      {
        const auto whole = net.whole();
        expect_near(*net, expected.weights, what);
      }
      const auto shown = average.shown();
      expect_near(*net, expected.averages, what + ", average");
    });
  }
}

}  // namespace fine_tuning_test
}  // namespace lockstep
