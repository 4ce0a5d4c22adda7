// Labels: arithmetic
// FusedSgd, FusedAdam and FusedAdamW against the optimizers of LibTorch that they are.
#include "optim/fused_optimizers.hpp"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace fused_optimizers_test {

using lockstep::FusedAdam;
using lockstep::FusedAdamW;
using lockstep::FusedSgd;
using torch::optim::OptimizerParamGroup;
using Weights = std::vector<torch::Tensor>;

Weights some_weights(at::ScalarType type) {
  torch::manual_seed(3);
  Weights weights;
  for (const auto& shape : std::vector<std::vector<int64_t>>{{50, 20, 5, 5}, {50}, {80, 33}, {7}, {1}}) {
    weights.push_back(torch::randn(shape, type).requires_grad_());
  }
  weights[0].set_data(weights[0].detach().contiguous(at::MemoryFormat::ChannelsLast));
  return weights;
}

// The same for both; weight 3 gets its first one late, and again none in step 5.
void give_gradients(const Weights& mine, const Weights& theirs, int step) {
  for (size_t i = 0; i < mine.size(); ++i) {
    const bool has_one = i != 3 || (step >= 2 && step != 5);
    mine[i].mutable_grad() = has_one ? torch::randn_like(mine[i]) : torch::Tensor();
    theirs[i].mutable_grad() = has_one ? mine[i].grad().clone() : torch::Tensor();
  }
}

using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<OptimizerParamGroup>& groups)>;

struct Kind {
  std::string name;
  std::shared_ptr<torch::optim::OptimizerOptions> of_second_group;
  Make fused, reference;
};

template <class Fused, class Reference, class Options>
Kind kind(const std::string& name, const Options& options, const Options& of_second_group) {
  return {name, std::make_shared<Options>(of_second_group),
          [options](const auto& groups) { return std::make_unique<Fused>(groups, options); },
          [options](const auto& groups) { return std::make_unique<Reference>(groups, options); }};
}

std::vector<Kind> kinds() {
  using namespace torch::optim;
  return {kind<FusedSgd, SGD>("plain", SGDOptions(0.1), SGDOptions(0.2)),
          kind<FusedSgd, SGD>("decay", SGDOptions(0.1).weight_decay(0.01), SGDOptions(0.2).weight_decay(0.02)),
          kind<FusedSgd, SGD>("momentum", SGDOptions(0.1).momentum(0.9).dampening(0.25),
                              SGDOptions(0.2).momentum(0.8).weight_decay(0.02)),
          kind<FusedSgd, SGD>("nesterov", SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.01),
                              SGDOptions(0.3).momentum(0.7)),
          kind<FusedAdam, Adam>("adam", AdamOptions(0.01).weight_decay(0.1), AdamOptions(0.02).betas({0.8, 0.9})),
          kind<FusedAdamW, AdamW>("adamw", AdamWOptions(0.01).weight_decay(0.1),
                                  AdamWOptions(0.02).eps(1e-3).betas({0.8, 0.9}))};
}

std::unique_ptr<torch::optim::Optimizer> made(const Kind& kind, const Make& make, const Weights& weights) {
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(Weights(weights.begin(), weights.begin() + 2));
  groups.emplace_back(Weights(weights.begin() + 2, weights.end()), kind.of_second_group->clone());
  return make(groups);
}

std::string saved(const torch::optim::Optimizer& optimizer) {
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  std::stringstream bytes;
  archive.save_to(bytes);
  return bytes.str();
}

void load(torch::optim::Optimizer& optimizer, const std::string& bytes) {
  std::stringstream stream(bytes);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  optimizer.load(archive);
}

void expect_near(const Weights& mine, const Weights& theirs) {
  for (size_t i = 0; i < mine.size(); ++i) {
    const double relative = mine[i].scalar_type() == torch::kFloat ? 2e-5 : 1e-13;
    EXPECT_TRUE(torch::allclose(mine[i], theirs[i], relative, relative)) << "weight " << i;
  }
}

TEST(FusedOptimizers, StepAsTheReferenceDoes) {
  for (const Kind& kind : kinds()) {
    for (const auto type : {torch::kFloat, torch::kDouble}) {
      SCOPED_TRACE(kind.name);
      const Weights mine = some_weights(type), theirs = some_weights(type);
      const auto fused = made(kind, kind.fused, mine), reference = made(kind, kind.reference, theirs);
      for (int step = 0; step < 10; ++step) {
        if (step == 7) {
          for (auto* optimizer : {fused.get(), reference.get()}) optimizer->param_groups()[1].options().set_lr(0.005);
        }
        give_gradients(mine, theirs, step);
        fused->step();
        reference->step();
        SCOPED_TRACE(step);
        expect_near(mine, theirs);
      }
    }
  }
}

// A checkpoint of LibTorch's optimizers is one of these, and the other way round.
TEST(FusedOptimizers, GoOnFromWhatTheReferenceHasSaved) {
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    const Weights mine = some_weights(torch::kDouble), theirs = some_weights(torch::kDouble);
    auto one = made(kind, kind.fused, mine), other = made(kind, kind.reference, theirs);
    for (int step = 0; step < 9; ++step) {
      if (step % 3 == 2) {  // each goes on as the other
        const std::string of_one = saved(*one), of_other = saved(*other);
        const bool fused = step == 2;
        one = made(kind, fused ? kind.reference : kind.fused, mine);
        other = made(kind, fused ? kind.fused : kind.reference, theirs);
        load(*one, of_one);
        load(*other, of_other);
      }
      give_gradients(mine, theirs, step);
      one->step();
      other->step();
    }
    expect_near(mine, theirs);
  }
}

// Then not even the rounding differs.
template <class Fused, class Reference, class Options>
void expect_left_to_the_reference(const Options& options, const std::function<void(Weights&)>& change) {
  Weights mine = some_weights(torch::kFloat), theirs = some_weights(torch::kFloat);
  for (auto* weights : {&mine, &theirs}) {
    torch::manual_seed(5);
    for (auto& weight : *weights) weight.mutable_grad() = torch::randn_like(weight.detach());
    change(*weights);
  }
  Fused fused(mine, options);
  Reference reference(theirs, options);
  for (int step = 0; step < 3; ++step) {
    fused.step();
    reference.step();
  }
  for (size_t i = 0; i < mine.size(); ++i) EXPECT_TRUE(torch::equal(mine[i], theirs[i])) << "weight " << i;
}

TEST(FusedOptimizers, LeaveToTheReferenceWhatNoKernelTakes) {
  using namespace torch::optim;
  const auto nothing = [](Weights&) {};
  expect_left_to_the_reference<FusedAdam, Adam>(AdamOptions(0.01).amsgrad(true), nothing);
  expect_left_to_the_reference<FusedAdamW, AdamW>(AdamWOptions(0.01).amsgrad(true), nothing);
  const auto transposed = [](Weights& weights) { weights[2].mutable_grad() = weights[2].grad().t().contiguous().t(); };
  const auto sparse = [](Weights& weights) { weights[2].mutable_grad() = weights[2].grad().to_sparse(); };
  expect_left_to_the_reference<FusedSgd, SGD>(SGDOptions(0.1).momentum(0.9), transposed);
  expect_left_to_the_reference<FusedAdam, Adam>(AdamOptions(0.01), transposed);
  expect_left_to_the_reference<FusedAdamW, AdamW>(AdamWOptions(0.01), transposed);
  expect_left_to_the_reference<FusedSgd, SGD>(SGDOptions(0.1), sparse);
}

// A rank may have slices of parameters of one type alone, whose bits must be those that they have beside others.
TEST(FusedOptimizers, GiveEachTypeTheBitsThatItHasAlone) {
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    const auto made_of = [&](const Weights& weights) { return kind.fused({OptimizerParamGroup(weights)}); };
    const Weights floats = some_weights(torch::kFloat), doubles = some_weights(torch::kDouble);
    const Weights same_floats = some_weights(torch::kFloat), same_doubles = some_weights(torch::kDouble);
    Weights both = floats;
    both.insert(both.end(), doubles.begin(), doubles.end());
    const auto of_both = made_of(both), of_floats = made_of(same_floats), of_doubles = made_of(same_doubles);
    for (int step = 0; step < 5; ++step) {
      give_gradients(floats, same_floats, step);
      give_gradients(doubles, same_doubles, step);
      for (auto* optimizer : {of_both.get(), of_floats.get(), of_doubles.get()}) optimizer->step();
    }
    for (size_t i = 0; i < floats.size(); ++i) {
      EXPECT_TRUE(torch::equal(floats[i], same_floats[i])) << "weight " << i;
      EXPECT_TRUE(torch::equal(doubles[i], same_doubles[i])) << "weight " << i;
    }
  }
}

TEST(ZeroGradients, ZeroesThemWhereTheyLie) {
  const Weights weights = some_weights(torch::kFloat);
  weights[2].mutable_grad() = torch::ones_like(weights[2]);
  const void* const place = weights[2].grad().const_data_ptr();
  lockstep::zero_gradients(weights);
  EXPECT_EQ(weights[2].grad().const_data_ptr(), place);
  EXPECT_EQ(weights[2].grad().abs().max().item<float>(), 0);
  EXPECT_FALSE(weights[1].grad().defined());
  lockstep::zero_gradients({});
}

// A state that was loaded may lie in memory otherwise than its parameter; a kernel would mix up its values.
TEST(FusedOptimizers, LeaveToTheReferenceAStateThatLiesOtherwise) {
  Weights mine{torch::arange(6.0).view({2, 3}).requires_grad_()}, theirs{mine[0].detach().clone().requires_grad_()};
  FusedAdam fused(mine, 0.1);
  torch::optim::Adam reference(theirs, 0.1);
  for (int step = 0; step < 3; ++step) {
    mine[0].mutable_grad() = torch::randn({2, 3});
    theirs[0].mutable_grad() = mine[0].grad().clone();
    fused.step();
    reference.step();
    auto& state = static_cast<torch::optim::AdamParamState&>(*fused.state().begin()->second);
    state.exp_avg(state.exp_avg().t().contiguous().t());
  }
  EXPECT_TRUE(torch::allclose(mine[0], theirs[0], 1e-5, 1e-5));
}

}  // namespace fused_optimizers_test
