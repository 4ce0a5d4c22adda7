// Labels: concurrency
// TiedLinear: layers that compute with one parameter train as on one device, wherever the net is cut.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/models/tied_linear.hpp>
#include <lockstep/split/split_model.hpp>

#include "support/error_of.hpp"
#include "support/group_tests.hpp"
#include "support/sharded_training.hpp"
#include "support/small_nets.hpp"
#include "support/test_devices.hpp"

#include <map>
#include <string>
#include <vector>

namespace lockstep {
namespace tied_layers_test {

using torch::Tensor;
namespace F = torch::nn::functional;
namespace nn = torch::nn;

constexpr int64_t kWords = 12, kWidth = 8;

// Two layers borrow the words' vectors.
nn::Sequential make_net(c10::ScalarType type = torch::kDouble) {
  nn::Sequential net({{"words", nn::AnyModule(nn::Embedding(kWords, kWidth))},
                      {"mix", nn::AnyModule(nn::Linear(kWidth, kWidth))},
                      {"out", nn::AnyModule(TiedLinear("words.weight"))},
                      {"back", nn::AnyModule(nn::Linear(kWords, kWidth))},
                      {"tanh", nn::AnyModule(nn::Tanh())},
                      {"head", nn::AnyModule(TiedLinear("words.weight"))}});
  net->to(type);
  int64_t number = 0;  // weights that look random, the same on every thread
  const torch::NoGradGuard no_grad;
  for (auto& parameter : net->parameters()) {
    const Tensor values = (torch::arange(parameter.numel()) * 7919 + 31 * ++number) % 1009;
    parameter.copy_((values.to(torch::kDouble) / 1009 - 0.5).view(parameter.sizes()));
  }
  tie_layers(*net);
  return net;
}

Tensor alone_forward(const std::map<std::string, Tensor>& w, const Tensor& x) {
  const Tensor words = w.at("words.weight");
  const Tensor mixed = F::linear(F::embedding(x, words), w.at("mix.weight"), w.at("mix.bias"));
  const Tensor back = F::linear(F::linear(mixed, words), w.at("back.weight"), w.at("back.bias"));
  return F::linear(back.tanh(), words);
}

Dataset words() {
  return {torch::arange(24) * 7 % kWords, torch::arange(24) * 5 % kWords};
}

std::map<std::string, Tensor> trained_alone() {
  std::map<std::string, Tensor> weights;
  std::vector<Tensor> parameters;
  for (const auto& item : make_net()->named_parameters()) {
    weights[item.key()] = item.value().detach().clone().requires_grad_();
    parameters.push_back(weights[item.key()]);
  }
  torch::optim::SGD sgd(parameters, torch::optim::SGDOptions(0.5).momentum(0.9));
  for (auto& batch : batches(words(), {.size = 10})) {
    sgd.zero_grad();
    F::cross_entropy(alone_forward(weights, batch.x), batch.y).backward();
    sgd.step();
  }
  return weights;
}

nn::Sequential trained(Rank& rank, const ModelSplit& split, int64_t grain = 0, c10::ScalarType type = torch::kDouble) {
  SplitModel net(make_net(type), rank, split);
  Optimizer sgd(net, torch::optim::SGDOptions(0.5).momentum(0.9));
  for (auto& batch : batches(words(), {.size = 10, .grain = grain}, net.mesh().data())) {
    sgd.zero_grad();
    net.loss(batch, F::cross_entropy).backward();
    sgd.step();
  }
  auto whole = make_net(type);
  net.gather(whole);
  return whole;
}

void expect_trained(const nn::Sequential& net, const std::map<std::string, Tensor>& alone) {
  for (const auto& item : net->named_parameters()) expect_near(item.value(), alone.at(item.key()), 1e-12, item.key());
}

using TiedLayersWorlds = Worlds;
INSTANTIATE_TEST_SUITE_P(Sizes, TiedLayersWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

TEST_P(TiedLayersWorlds, EveryMeshTrainsLikeOneDevice) {
  const auto alone = trained_alone();
  on_ranks([&](Rank& rank) {
    for (const auto& mesh : mesh_shapes(rank.world_size())) {
      SCOPED_TRACE(to_string(mesh));
      expect_trained(trained(rank, {.mesh = mesh}), alone);
      if (mesh.pipeline == 1) continue;
      expect_trained(trained(rank, {.mesh = mesh, .schedule = PipelineSchedule::gpipe, .microbatches = 3}), alone);
      if (mesh.pipeline > 3) continue;
      // With two ranks a stage borrows from a stage of its own rank too.
      const ModelSplit split{.mesh = mesh,
                             .schedule = PipelineSchedule::interleaved,
                             .stages_per_rank = mesh.pipeline == 2 ? 3 : 2,
                             .microbatches = 3,
                             .recompute = true};
      expect_trained(trained(rank, split), alone);
    }
  });
}

TEST_P(TiedLayersWorlds, WithAGrainAPipelineGivesTheBitsOfOneDevice) {
  std::map<std::string, Tensor> alone;
  run(test_devices(1), [&](Rank& rank) {
    for (const auto& item : trained(rank, {}, /*grain=*/3, torch::kFloat)->named_parameters())
      alone[item.key()] = item.value();
  });
  on_ranks([&](Rank& rank) {
    for (const auto& mesh : mesh_shapes(rank.world_size())) {
      if (mesh.tensor > 1) continue;
      SCOPED_TRACE(to_string(mesh));
      for (const auto& item : trained(rank, {.mesh = mesh}, /*grain=*/3, torch::kFloat)->named_parameters()) {
        EXPECT_TRUE(torch::equal(item.value(), alone[item.key()])) << item.key();
      }
    }
  });
}

// A head that is tied to a parameter of which every rank keeps all.
TEST_P(TiedLayersWorlds, ATiedLayerIsKeptWholeWithItsParameter) {
  nn::Sequential net({{"words", nn::AnyModule(kept(nn::Embedding(kWords, kWidth)))},
                      {"head", nn::AnyModule(TiedLinear("words.layer.weight"))}});
  tie_layers(*net);
  const Tensor x = words().x, expected = net->forward(x).detach();
  on_ranks([&](Rank& rank) {
    expect_near(shard(net, rank)->forward(x.to(rank.device())).detach(), expected, 1e-6, "result");
  });
}

// A parameter that is frozen gets nothing; the others learn.
TEST(TiedLayersTest, AFrozenParameterIsLentAndNotTrained) {
  run(test_devices(2), [](Rank& rank) {
    auto net = make_net();
    net->named_parameters()["words.weight"].requires_grad_(false);
    SplitModel split(net, rank, {.mesh = {.pipeline = 2}, .microbatches = 2});
    Optimizer sgd(split, torch::optim::SGDOptions(0.5));
    for (auto& batch : batches(words(), {.size = 12})) {
      sgd.zero_grad();
      split.loss(batch, F::cross_entropy).backward();
      sgd.step();
    }
    auto whole = make_net(), start = make_net();
    split.gather(whole);
    for (const auto& item : whole->named_parameters()) {
      EXPECT_EQ(torch::equal(item.value(), start->named_parameters()[item.key()]), item.key() == "words.weight")
          << item.key();
    }
  });
}

TEST(TiedLayersTest, WhatIsNotTiedSaysWhatToDo) {
  TiedLinear head("words.weight");
  EXPECT_THAT(error_of([&] { head(torch::zeros({1, kWidth})); }), Refused());
  auto clone = std::dynamic_pointer_cast<nn::SequentialImpl>(make_net()->clone());  // LibTorch's: its layers are "0", …
  EXPECT_THAT(error_of([&] { clone->forward(words().x); }), Refused());
  nn::Sequential other(
      {{"letters", nn::AnyModule(nn::Embedding(kWords, kWidth))}, {"head", nn::AnyModule(TiedLinear("words.weight"))}});
  EXPECT_THAT(error_of([&] { tie_layers(*other); }), Refused());
}

TEST(TiedLayersTest, TiesThatCannotBeFollowedAreRefused) {
  nn::Sequential reversed({{"first", nn::AnyModule(TiedLinear("last.weight"))},
                           {"mix", nn::AnyModule(nn::Linear(kWidth, kWidth))},
                           {"last", nn::AnyModule(nn::Linear(kWidth, kWidth))}});
  reversed->to(torch::kDouble);
  tie_layers(*reversed);
  const auto error_of_mesh = [&](const MeshShape& mesh) {
    return error_on_ranks(2, [&](Rank& rank) {
      auto net = copy_of(reversed);
      tie_layers(*net);
      SplitModel split(net, rank, {.mesh = mesh});
    });
  };
  EXPECT_THAT(error_of_mesh({.pipeline = 2}), Refused());
  EXPECT_THAT(error_of_mesh({.tensor = 2}), Refused());
  EXPECT_THAT(error_on_ranks(2,
                             [](Rank& rank) {
                               const nn::Sequential net(nn::Linear(8, 8), TiedLinear("nobodys.weight"));
                               SplitModel split(net, rank, {.mesh = {.pipeline = 2}});
                             }),
              Refused());
}

}  // namespace tied_layers_test
}  // namespace lockstep
