// A torch::optim optimizer that goes on from a kept state does the steps that it would have done.
#include "optim/optimizer_state.hpp"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "support/error_of.hpp"
#include "support/scratch_folder.hpp"

#include <functional>
#include <memory>

namespace optimizer_state_test {

using lockstep::error_of;
using lockstep::load_optimizer_state;
using lockstep::optimizer_state;
using lockstep::Refused;
using lockstep::io::NamedTensors;
using testing::ElementsAre;
using torch::Tensor;

using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<Tensor>&)>;

const std::vector<std::pair<std::string, Make>> optimizers = {
    {"sgd",
     [](auto& p) { return std::make_unique<torch::optim::SGD>(p, torch::optim::SGDOptions(0.1).momentum(0.9)); }},
    {"adam",
     [](auto& p) { return std::make_unique<torch::optim::Adam>(p, torch::optim::AdamOptions(0.1).amsgrad(true)); }},
    {"adamw", [](auto& p) { return std::make_unique<torch::optim::AdamW>(p, torch::optim::AdamWOptions(0.1)); }},
    {"rmsprop", [](auto& p) { return std::make_unique<torch::optim::RMSprop>(p, torch::optim::RMSpropOptions(0.1)); }},
    {"adagrad", [](auto& p) { return std::make_unique<torch::optim::Adagrad>(p, torch::optim::AdagradOptions(0.1)); }}};

// A matrix, a convolution's weight in channels-last order, a single number, and what never gets a gradient.
NamedTensors new_parameters() {
  NamedTensors parameters = {{"fc.weight", torch::ones({3, 2})},
                             {"conv.weight", torch::ones({2, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast)},
                             {"scale", torch::ones({})},
                             {"unused", torch::ones({2})}};
  for (auto& [name, parameter] : parameters) parameter.requires_grad_();
  return parameters;
}

std::vector<Tensor> tensors_of(const NamedTensors& named) {
  std::vector<Tensor> tensors;
  for (const auto& [name, tensor] : named) tensors.push_back(tensor);
  return tensors;
}

void step(torch::optim::Optimizer& optimizer, const NamedTensors& parameters, int number) {
  for (const auto& [name, parameter] : parameters) {
    if (name == "unused") continue;
    parameter.mutable_grad() =
        torch::sin(parameter.detach() * number + torch::arange(parameter.numel()).view(parameter.sizes()));
  }
  optimizer.step();
}

// Through a file, as a checkpoint does it.
NamedTensors kept(const NamedTensors& state) {
  const lockstep::ScratchFolder folder;
  lockstep::io::write_safetensors(folder / "state", state);
  return lockstep::io::read_safetensors(folder / "state");
}

TEST(OptimizerState, GoesOnWithTheSameBits) {
  for (const auto& [name, make] : optimizers) {
    SCOPED_TRACE(name);
    const NamedTensors expected = new_parameters();
    const auto uninterrupted = make(tensors_of(expected));
    NamedTensors parameters = new_parameters();
    auto optimizer = make(tensors_of(parameters));
    for (int number = 1; number <= 6; ++number) {
      if (number == 4) {
        const NamedTensors state = kept(optimizer_state(*optimizer, parameters));
        EXPECT_GE(state.size(), 3u);
        NamedTensors copies = new_parameters();
        for (size_t i = 0; i < copies.size(); ++i) copies[i].second.detach().copy_(parameters[i].second.detach());
        parameters = copies;
        optimizer = make(tensors_of(parameters));
        load_optimizer_state(*optimizer, parameters, state);
      }
      step(*uninterrupted, expected, number);
      step(*optimizer, parameters, number);
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(torch::equal(parameters[i].second, expected[i].second)) << expected[i].first << ", step " << number;
      }
    }
  }
}

TEST(OptimizerState, IsNamedByMemberAndParameter) {
  const NamedTensors parameters = new_parameters();
  torch::optim::Adam adam(tensors_of(parameters), torch::optim::AdamOptions(0.1));
  EXPECT_TRUE(optimizer_state(adam, parameters).empty());
  step(adam, parameters, 1);
  step(adam, parameters, 2);
  std::map<std::string, Tensor> state;
  for (const auto& [name, tensor] : optimizer_state(adam, parameters)) state[name] = tensor;
  std::vector<std::string> names;
  for (const auto& [name, tensor] : state) names.push_back(name);
  EXPECT_THAT(names, ElementsAre("exp_avg.conv.weight", "exp_avg.fc.weight", "exp_avg.scale", "exp_avg_sq.conv.weight",
                                 "exp_avg_sq.fc.weight", "exp_avg_sq.scale", "step.conv.weight", "step.fc.weight",
                                 "step.scale"));
  EXPECT_EQ(state["step.scale"].item<int64_t>(), 2);
  EXPECT_EQ(state["exp_avg.conv.weight"].sizes(), (std::vector<int64_t>{2, 3, 2, 2}));
}

TEST(OptimizerState, KeepsTheOptions) {
  const NamedTensors parameters = new_parameters();
  torch::optim::SGD before(tensors_of(parameters), torch::optim::SGDOptions(0.1).momentum(0.9));
  step(before, parameters, 1);
  torch::optim::SGD after(tensors_of(parameters), torch::optim::SGDOptions(0.25).momentum(0.5));
  load_optimizer_state(after, parameters, optimizer_state(before, parameters));
  EXPECT_EQ(static_cast<torch::optim::SGDOptions&>(after.param_groups()[0].options()).lr(), 0.25);
  EXPECT_EQ(static_cast<torch::optim::SGDOptions&>(after.param_groups()[0].options()).momentum(), 0.5);
}

TEST(OptimizerState, RefusesWhatIsNotItsOwn) {
  const NamedTensors parameters = new_parameters();
  torch::optim::SGD sgd(tensors_of(parameters), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::Adam adam(tensors_of(parameters), torch::optim::AdamOptions(0.1));
  step(sgd, parameters, 1);
  step(adam, parameters, 1);
  const NamedTensors of_sgd = optimizer_state(sgd, parameters), of_adam = optimizer_state(adam, parameters);
  EXPECT_THAT(error_of([&] { load_optimizer_state(sgd, parameters, of_adam); }), Refused());
  EXPECT_THAT(error_of([&] { load_optimizer_state(adam, parameters, of_sgd); }), Refused());
  NamedTensors fewer(parameters.begin(), parameters.begin() + 1);
  torch::optim::SGD other(tensors_of(fewer), torch::optim::SGDOptions(0.1).momentum(0.9));
  EXPECT_THAT(error_of([&] { load_optimizer_state(other, fewer, of_sgd); }), Refused());
}

// One of somebody's own whose state cannot be saved.
struct Forgetful : torch::optim::SGD {
  using SGD::SGD;
  struct State : torch::optim::OptimizerParamState {};
  Tensor step(LossClosure) override {
    for (const auto& parameter : parameters()) state()[parameter.unsafeGetTensorImpl()] = std::make_unique<State>();
    return {};
  }
};

TEST(OptimizerState, RefusesAnOptimizerThatCannotBeSaved) {
  const NamedTensors parameters = new_parameters();
  Forgetful forgetful(tensors_of(parameters), torch::optim::SGDOptions(0.1));
  forgetful.step(nullptr);
  EXPECT_THAT(error_of([&] { optimizer_state(forgetful, parameters); }), Refused());
}

}  // namespace optimizer_state_test
