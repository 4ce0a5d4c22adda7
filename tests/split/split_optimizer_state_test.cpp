// All that optimizers of a split network remember is gathered as the whole network's, and given to any other split.
#include "split/split_optimizer_state.hpp"

#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/models/models.hpp>
#include <lockstep/split/split_model.hpp>
#include <lockstep/trainer/train_options.hpp>

#include "data_parallel/hidden_gradients.hpp"
#include "data_parallel/net_optimizer.hpp"
#include "io/checked_tensors.hpp"
#include "support/error_of.hpp"
#include "support/scratch_folder.hpp"
#include "support/test_devices.hpp"

#include <map>
#include <memory>
#include <string>
#include <utility>

namespace split_optimizer_state_test {

using lockstep::ModelSplit;
using lockstep::NetOptimizer;
using lockstep::Rank;
using lockstep::Refused;
using lockstep::SplitModel;
using lockstep::io::NamedTensors;

torch::nn::Sequential make_net() {
  return lockstep::make_model({.name = "mlp", .width = 0.03125}, /*seed=*/1);
}

std::unique_ptr<NetOptimizer> optimizer_of(SplitModel& net, bool adam) {
  const auto make = [adam](auto groups) -> std::unique_ptr<torch::optim::Optimizer> {
    if (adam) return std::make_unique<torch::optim::Adam>(groups, torch::optim::AdamOptions(0.001));
    return std::make_unique<torch::optim::SGD>(groups, torch::optim::SGDOptions(0.1).momentum(0.9));
  };
  return std::make_unique<NetOptimizer>(net.trained(), make, lockstep::Optimizer::Grouping(), "test");
}

// `without`: a layer whose parameters get no gradient, so that the optimizer remembers nothing of them.
void train(SplitModel& net, NetOptimizer& optimizer, const lockstep::Dataset& data, int64_t epoch,
           const std::string& without) {
  for (auto& batch : lockstep::batches(data, {.size = 32, .seed = 0, .epoch = epoch}, net.mesh().data())) {
    optimizer.zero_grad(/*in_place=*/true);
    net.loss(batch, torch::nn::functional::cross_entropy).backward();
    {
      const lockstep::Replica& part = *optimizer.replica();
      const lockstep::HiddenGradients::Shown gradients(part.hidden_gradients());
      for (auto& item : part.module().named_parameters()) {
        if (!without.empty() && item.key().starts_with(without + ".")) item.value().mutable_grad() = torch::Tensor();
      }
    }
    optimizer.step({});
  }
}

// The whole state after three steps on these ranks, and after a change to `then` six steps.
std::pair<NamedTensors, NamedTensors> states(const ModelSplit& split, const ModelSplit& then, bool adam,
                                             const std::string& without = "") {
  const auto data = lockstep::synthetic_images(96, 10).train;
  std::pair<NamedTensors, NamedTensors> result;
  lockstep::run(lockstep::test_devices(split.mesh.size()), [&](Rank& rank) {
    SplitModel net(make_net(), rank, split);
    const auto optimizer = optimizer_of(net, adam);
    train(net, *optimizer, data, 1, without);
    const NamedTensors state = optimizer->state();
    if (rank.index() == 0) result.first = state;

    auto whole = make_net();
    net.gather(whole);
    SplitModel other(whole, rank, then);
    const auto goes_on = optimizer_of(other, adam);
    goes_on->load_state(state);
    train(other, *goes_on, data, 2, without);
    const NamedTensors later = goes_on->state();
    if (rank.index() == 0) result.second = later;
  });
  return result;
}

void expect_near(const NamedTensors& found, const NamedTensors& expected) {
  ASSERT_EQ(found.size(), expected.size());
  const std::map<std::string, torch::Tensor> by_name(found.begin(), found.end());
  for (const auto& [name, tensor] : expected) {
    const auto same = by_name.find(name);
    ASSERT_NE(same, by_name.end()) << name;
    ASSERT_EQ(same->second.sizes(), tensor.sizes()) << name;
    EXPECT_EQ(same->second.scalar_type(), tensor.scalar_type()) << name;
    EXPECT_TRUE(torch::allclose(same->second.cpu(), tensor.cpu(), 1e-3, 1e-6)) << name;
  }
}

TEST(SplitOptimizerState, IsTheWholeNetworksWhateverTheSplit) {
  for (const bool adam : {false, true}) {
    SCOPED_TRACE(adam ? "adam" : "sgd");
    const ModelSplit one{.mesh = {.data = 1}};
    const auto expected = states(one, one, adam);
    EXPECT_GE(expected.first.size(), 10u);
    const ModelSplit data{.mesh = {.data = 4}}, layers{.mesh = {.data = 2, .pipeline = 2}, .microbatches = 2},
        channels{.mesh = {.data = 2, .tensor = 2}}, both{.mesh = {.pipeline = 2, .tensor = 2}, .microbatches = 2};
    for (const auto& [split, then] :
         {std::pair(data, both), std::pair(both, layers), std::pair(layers, channels), std::pair(channels, data)}) {
      SCOPED_TRACE(to_string(split) + " to " + to_string(then));
      const auto found = states(split, then, adam);
      expect_near(found.first, expected.first);
      expect_near(found.second, expected.second);
    }
  }
}

// Layers that no step has used have no state.
TEST(SplitOptimizerState, OfSomeParametersAloneIsGatheredToo) {
  const ModelSplit one{.mesh = {.data = 1}}, both{.mesh = {.pipeline = 2, .tensor = 2}, .microbatches = 2};
  for (const std::string without : {"fc1", "output"}) {  // on the first stage, on the last one
    SCOPED_TRACE(without);
    const auto expected = states(one, one, /*adam=*/true, without);
    for (const auto& [name, tensor] : expected.first) EXPECT_FALSE(name.ends_with(without + ".weight")) << name;
    const auto found = states(both, both, /*adam=*/true, without);
    expect_near(found.first, expected.first);
    expect_near(found.second, expected.second);
  }
}

// Written on two stages of two slices, read on one device and by its own ranks.
TEST(SplitOptimizerState, GoesThroughAFileToAnotherSplit) {
  const lockstep::ScratchFolder folder;
  const auto file = folder / "adam.safetensors";
  const ModelSplit both{.mesh = {.pipeline = 2, .tensor = 2}, .microbatches = 2};
  const auto data = lockstep::synthetic_images(96, 10).train;
  NamedTensors expected;
  lockstep::run(lockstep::test_devices(4), [&](Rank& rank) {
    SplitModel net(make_net(), rank, both);
    const auto adam = optimizer_of(net, /*adam=*/true);
    train(net, *adam, data, 1, "");
    adam->save(file);
    const NamedTensors state = adam->state();
    if (rank.index() == 0) expected = state;
    rank.barrier();  // the file is there
    const auto other = optimizer_of(net, /*adam=*/true);
    other->load(file);
    expect_near(other->state(), state);
  });
  lockstep::run(lockstep::test_devices(1), [&](Rank& rank) {
    SplitModel net(make_net(), rank, {});
    const auto adam = optimizer_of(net, /*adam=*/true);
    adam->load(file);
    expect_near(adam->state(), expected);
  });
}

// All ranks list the same, whichever of them hold the layers.
TEST(SplitOptimizerState, OfAnotherNetworkIsTakenAsFarAsItFits) {
  const lockstep::ScratchFolder folder;
  const ModelSplit both{.mesh = {.pipeline = 2, .tensor = 2}, .microbatches = 2};
  lockstep::run(lockstep::test_devices(4), [&](Rank& rank) {
    SplitModel net(make_net(), rank, both);
    const auto adam = optimizer_of(net, /*adam=*/true);
    train(net, *adam, lockstep::synthetic_images(96, 10).train, 1, "");
    NamedTensors state = adam->state(), kept;
    for (auto& [name, tensor] : state) {
      const bool fits = !name.ends_with(".fc1.weight") && !name.ends_with(".output.bias");
      if (fits) kept.emplace_back(name, tensor);
      if (name.ends_with(".fc1.weight") && tensor.dim() > 0) tensor = torch::ones({3, 5});
      if (name.ends_with(".output.bias")) name.replace(name.find("output"), 6, "head");
    }
    if (rank.index() == 0) lockstep::io::write_checked(folder / "adam", state);
    rank.barrier();
    const auto other = optimizer_of(net, /*adam=*/true);
    const lockstep::UnmatchedNames unmatched = other->load(folder / "adam", /*strict=*/false);
    EXPECT_THAT(unmatched.missing, testing::ElementsAre("fc1.weight", "output.bias")) << rank.index();
    EXPECT_THAT(unmatched.unexpected, testing::ElementsAre("fc1.weight", "head.bias")) << rank.index();
    expect_near(other->state(), kept);
  });
}

TEST(SplitOptimizerState, ThatFitsNoParameterIsRefused) {
  const ModelSplit both{.mesh = {.pipeline = 2, .tensor = 2}, .microbatches = 2};
  lockstep::run(lockstep::test_devices(4), [&](Rank& rank) {
    SplitModel net(make_net(), rank, both);
    const auto optimizer = optimizer_of(net, /*adam=*/false);
    const auto error = [&](const std::string& name, const torch::Tensor& tensor) {
      return lockstep::error_of([&] { optimizer->load_state({{name, tensor}}); });
    };
    EXPECT_THAT(error("momentum_buffer.fc9.weight", torch::ones({2})), Refused());
    EXPECT_THAT(error("momentum_buffer", torch::ones({2})), Refused());
    const auto wrong = error("momentum_buffer.fc1.weight", torch::ones({3, 5}));
    EXPECT_EQ(wrong == "(no error)", rank.index() > 1);  // only the first stage's ranks hold this layer
    if (rank.index() < 2) EXPECT_THAT(wrong, Refused());
  });
}

}  // namespace split_optimizer_state_test
