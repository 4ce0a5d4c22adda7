// Labels: arithmetic
// Lars and Lamb against the published algorithms written out, number by number; make_optimizer against LibTorch's.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/lab/lamb.hpp>
#include <lockstep/lab/lars.hpp>
#include <lockstep/lab/optimizers.hpp>
#include <lockstep/optim/decay_groups.hpp>

#include "support/error_of.hpp"

#include <cmath>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

namespace optimizers_test {

using lockstep::error_of;
using lockstep::Lamb;
using lockstep::LambOptions;
using lockstep::Lars;
using lockstep::LarsOptions;
using lockstep::make_optimizer;
using lockstep::optimizer_from;
using lockstep::OptimizerSettings;
using lockstep::Refused;
using Numbers = std::vector<double>;

std::vector<torch::Tensor> some_weights() {
  torch::manual_seed(3);
  std::vector<torch::Tensor> weights;
  for (const auto& shape : std::vector<std::vector<int64_t>>{{4, 3, 2, 2}, {4}, {6, 5}, {1}}) {
    weights.push_back(torch::randn(shape, torch::kDouble).requires_grad_());
  }
  return weights;
}

// The same in every run of a test; large and small by turns.
std::vector<torch::Tensor> gradients_of_step(const std::vector<torch::Tensor>& weights, int step) {
  torch::manual_seed(100 + step);
  std::vector<torch::Tensor> gradients;
  for (const auto& w : weights) gradients.push_back(torch::randn_like(w.detach()) * (step % 2 == 0 ? 3.0 : 0.01));
  return gradients;
}

void give_gradients(const std::vector<torch::Tensor>& weights, int step) {
  const auto gradients = gradients_of_step(weights, step);
  for (size_t i = 0; i < weights.size(); ++i) weights[i].mutable_grad() = gradients[i];
}

Numbers numbers(const torch::Tensor& tensor) {
  const auto flat = tensor.detach().contiguous();
  return {flat.const_data_ptr<double>(), flat.const_data_ptr<double>() + flat.numel()};
}

double norm(const Numbers& values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum);
}

// One layer's weights after each step, and what its optimizer remembers.
struct Layer {
  Numbers w, v = Numbers(w.size()), m = Numbers(w.size());
  int t = 0;
};

// You et al. 2017, algorithm 1.
void lars_step(Layer& layer, const Numbers& g, const LarsOptions& o) {
  const double w_norm = norm(layer.w), g_norm = norm(g);
  const double rate = !o.adapt() || w_norm == 0 || g_norm == 0
                          ? 1
                          : o.trust() * w_norm / (g_norm + o.weight_decay() * w_norm + o.eps());
  for (size_t i = 0; i < g.size(); ++i) {
    layer.v[i] = o.momentum() * layer.v[i] + o.lr() * rate * (g[i] + o.weight_decay() * layer.w[i]);
    layer.w[i] -= layer.v[i];
  }
}

// You et al. 2020, algorithm 2.
void lamb_step(Layer& layer, const Numbers& g, const LambOptions& o) {
  const auto [beta1, beta2] = o.betas();
  ++layer.t;
  Numbers update(g.size());
  for (size_t i = 0; i < g.size(); ++i) {
    layer.m[i] = beta1 * layer.m[i] + (1 - beta1) * g[i];
    layer.v[i] = beta2 * layer.v[i] + (1 - beta2) * g[i] * g[i];
    const double m = layer.m[i] / (1 - std::pow(beta1, layer.t)), v = layer.v[i] / (1 - std::pow(beta2, layer.t));
    update[i] = m / (std::sqrt(v) + o.eps()) + o.weight_decay() * layer.w[i];
  }
  const double w_norm = norm(layer.w), u_norm = norm(update);
  const double ratio = !o.adapt() || w_norm == 0 || u_norm == 0 ? 1 : w_norm / u_norm;
  for (size_t i = 0; i < g.size(); ++i) layer.w[i] -= o.lr() * ratio * update[i];
}

void expect_near(const torch::Tensor& weight, const Numbers& expected, double tolerance = 1e-13) {
  const auto got = numbers(weight);
  for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected[i], tolerance * (1 + std::abs(expected[i])));
}

template <class Optimizer, class Options>
void expect_follows(const Options& options, void (*reference)(Layer&, const Numbers&, const Options&)) {
  const auto weights = some_weights();
  {
    const torch::NoGradGuard no_grad;
    weights[3].zero_();  // a layer whose norm is 0
  }
  std::vector<Layer> layers;
  for (const auto& w : weights) layers.push_back({.w = numbers(w)});
  Optimizer optimizer(weights, options);
  for (int step = 0; step < 8; ++step) {
    give_gradients(weights, step);
    if (step == 2) weights[1].mutable_grad().zero_();
    for (size_t i = 0; i < weights.size(); ++i) reference(layers[i], numbers(weights[i].grad()), options);
    optimizer.step();
    for (size_t i = 0; i < weights.size(); ++i) {
      SCOPED_TRACE("layer " + std::to_string(i) + ", step " + std::to_string(step));
      expect_near(weights[i], layers[i].w);
    }
  }
}

TEST(Lars, FollowsThePublishedAlgorithm) {
  expect_follows<Lars>(LarsOptions(2), lars_step);
  expect_follows<Lars>(LarsOptions(10).momentum(0.8).weight_decay(0.05).trust(0.01), lars_step);
  expect_follows<Lars>(LarsOptions(5).momentum(0).weight_decay(0.5).eps(0.3), lars_step);
  expect_follows<Lars>(LarsOptions(0.01).weight_decay(0.05).adapt(false), lars_step);
}

TEST(Lamb, FollowsThePublishedAlgorithm) {
  expect_follows<Lamb>(LambOptions(), lamb_step);
  expect_follows<Lamb>(LambOptions(0.1).weight_decay(0.3).eps(1e-3), lamb_step);
  expect_follows<Lamb>(LambOptions(0.02).betas({0.7, 0.9}), lamb_step);
  expect_follows<Lamb>(LambOptions(0.02).weight_decay(0.1).adapt(false), lamb_step);
}

// 0.2, which is for SGD, would end Adam's training at once.
TEST(MakeOptimizer, HasALearningRateForEachKind) {
  for (const auto& [name, lr] : {std::pair("sgd", 0.2), std::pair("adam", 0.001), std::pair("adamw", 0.001),
                                 std::pair("lamb", 0.001), std::pair("lars", 1.0)}) {
    const auto rate = [&, name = name](const OptimizerSettings& settings) {
      return make_optimizer(optimizer_from(name), {some_weights()}, settings)->param_groups().at(0).options().get_lr();
    };
    EXPECT_EQ(rate({}), lr) << name;
    EXPECT_EQ(rate({.lr = 0.2}), 0.2) << name;
  }
}

// A layer's step is a share of its size, however large the gradients are: what the two are for.
TEST(Lars, StepsByAShareOfTheLayer) {
  for (const double gradient : {1e-3, 1.0, 1e3}) {
    const auto w = torch::ones({10, 10}, torch::kDouble).requires_grad_();
    w.mutable_grad() = torch::full({10, 10}, gradient, torch::kDouble);
    Lars({w}, LarsOptions(2)).step();
    EXPECT_NEAR(w.sub(1).norm().item<double>(), 2 * 0.001 * 10, 1e-12);
  }
}

TEST(Lamb, StepsByAShareOfTheLayer) {
  for (const double gradient : {1e-3, 1.0, 1e3}) {
    const auto w = torch::ones({10, 10}, torch::kDouble).requires_grad_();
    w.mutable_grad() = torch::full({10, 10}, gradient, torch::kDouble);
    Lamb({w}, LambOptions(0.02)).step();
    EXPECT_NEAR(w.sub(1).norm().item<double>(), 0.02 * 10, 1e-12);
  }
}

// Without the ratio Lamb is AdamW but for the order in which the weights decay, which matters by lr^2.
TEST(Lamb, IsNearlyAdamWWithoutTheRatio) {
  const auto mine = some_weights(), theirs = some_weights();
  Lamb lamb(mine, LambOptions(1e-3).adapt(false).eps(1e-8));
  torch::optim::AdamW adamw(theirs, torch::optim::AdamWOptions(1e-3).weight_decay(0));
  for (int step = 0; step < 5; ++step) {
    give_gradients(mine, step);
    give_gradients(theirs, step);
    lamb.step();
    adamw.step();
  }
  for (size_t i = 0; i < mine.size(); ++i) EXPECT_TRUE(torch::allclose(mine[i], theirs[i], 1e-12, 1e-14)) << i;
}

// Three steps, kept and read into another optimizer for other tensors, three more: as six in one go. Groups keep their
// own options.
template <class Optimizer, class Options>
void expect_goes_on(const Options& options, const Options& other) {
  using torch::optim::OptimizerParamGroup;
  const auto with_groups = [&](const std::vector<torch::Tensor>& weights, const Options& second) {
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<torch::Tensor>{weights[0], weights[2]});
    groups.emplace_back(std::vector<torch::Tensor>{weights[1], weights[3]}, std::make_unique<Options>(second));
    return Optimizer(groups, options);
  };
  const auto run = [](Optimizer& optimizer, const std::vector<torch::Tensor>& weights, int begin, int end) {
    for (int step = begin; step < end; ++step) {
      give_gradients(weights, step);
      optimizer.step();
    }
  };
  const auto whole = some_weights(), first = some_weights();
  auto uninterrupted = with_groups(whole, other);
  run(uninterrupted, whole, 0, 6);
  auto stopped = with_groups(first, other);
  run(stopped, first, 0, 3);
  std::stringstream file;
  torch::save(stopped, file);

  std::vector<torch::Tensor> second;
  for (const auto& w : first) second.push_back(w.detach().clone().requires_grad_());
  auto resumed = with_groups(second, Options(77));  // the file overrides 77
  torch::load(resumed, file);
  const auto values = [](const Options& of) { return std::tuple(of.lr(), of.weight_decay(), of.eps(), of.adapt()); };
  const auto loaded = [&](size_t group) {
    return values(static_cast<const Options&>(resumed.param_groups()[group].options()));
  };
  EXPECT_EQ(loaded(1), values(other));
  EXPECT_NE(loaded(0), values(other));
  run(resumed, second, 3, 6);
  for (size_t i = 0; i < whole.size(); ++i) EXPECT_TRUE(torch::equal(second[i], whole[i])) << i;
}

TEST(Lars, GoesOnFromAFile) {
  expect_goes_on<Lars>(LarsOptions(2).weight_decay(0.01), LarsOptions(0.1).momentum(0.5).adapt(false).eps(0.1));
}

TEST(Lamb, GoesOnFromAFile) {
  expect_goes_on<Lamb>(LambOptions(0.01).weight_decay(0.01), LambOptions(0.1).betas({0.5, 0.6}).adapt(false));
}

TEST(Optimizers, LeaveWhatHasNoGradientAndReturnTheClosuresLoss) {
  for (const char* name : {"sgd", "adam", "adamw", "lars", "lamb"}) {
    SCOPED_TRACE(name);
    const auto weights = some_weights();
    const auto before = weights[1].detach().clone(), moved = weights[2].detach().clone();
    const auto optimizer = make_optimizer(optimizer_from(name), {weights}, {.lr = 0.1, .weight_decay = 0.1});
    const auto loss = optimizer->step([&] {
      auto loss = weights[2].square().sum();
      loss.backward();
      return loss;
    });
    EXPECT_GT(loss.item<double>(), 0);
    EXPECT_TRUE(torch::equal(weights[1], before));
    EXPECT_FALSE(torch::equal(weights[2], moved));
  }
}

TEST(Optimizers, AreThoseOfTheirNames) {
  using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<torch::Tensor>&)>;
  const double lr = 0.05, decay = 0.1;
  struct Case {
    std::string name;
    OptimizerSettings settings;
    Make expected;
  };
  const auto make = []<class Optimizer, class Options>(std::type_identity<Optimizer>, const Options& options) -> Make {
    return [=](const std::vector<torch::Tensor>& weights) { return std::make_unique<Optimizer>(weights, options); };
  };
  using namespace torch::optim;
  const std::vector<Case> cases = {
      {"sgd", {.lr = lr}, make(std::type_identity<SGD>(), SGDOptions(lr))},
      {"sgd",
       {.lr = lr, .momentum = 0.9, .nesterov = true, .weight_decay = decay},
       make(std::type_identity<SGD>(), SGDOptions(lr).momentum(0.9).nesterov(true).weight_decay(decay))},
      {"adam",
       {.lr = lr, .weight_decay = decay},
       make(std::type_identity<Adam>(), AdamOptions(lr).weight_decay(decay))},
      {"adamw", {.lr = lr}, make(std::type_identity<AdamW>(), AdamWOptions(lr).weight_decay(0))},
      {"adamw",
       {.lr = lr, .weight_decay = decay},
       make(std::type_identity<AdamW>(), AdamWOptions(lr).weight_decay(decay))},
      {"lars",
       {.lr = lr, .momentum = 0.5, .weight_decay = decay},
       make(std::type_identity<Lars>(), LarsOptions(lr).momentum(0.5).weight_decay(decay))},
      {"lamb",
       {.lr = lr, .weight_decay = decay},
       make(std::type_identity<Lamb>(), LambOptions(lr).weight_decay(decay))}};
  for (const auto& [name, settings, expected] : cases) {
    SCOPED_TRACE(to_string(optimizer_from(name), settings));
    const auto mine = some_weights(), theirs = some_weights();
    const auto optimizer = make_optimizer(optimizer_from(name), {mine}, settings), reference = expected(theirs);
    for (int step = 0; step < 4; ++step) {
      if (step == 2) {
        lockstep::set_learning_rate(*optimizer, 0.01);
        reference->param_groups()[0].options().set_lr(0.01);
      }
      give_gradients(mine, step);
      give_gradients(theirs, step);
      optimizer->step();
      reference->step();
    }
    for (size_t i = 0; i < mine.size(); ++i) EXPECT_TRUE(torch::allclose(mine[i], theirs[i], 1e-13, 1e-13)) << i;
  }
}

TEST(Optimizers, TakeALearningRateForAllTheirGroups) {
  const auto weights = some_weights();
  Lars lars({torch::optim::OptimizerParamGroup({weights[0]}), torch::optim::OptimizerParamGroup({weights[1]})},
            LarsOptions(1));
  lockstep::set_learning_rate(lars, 0.25);
  for (const auto& group : lars.param_groups()) EXPECT_EQ(group.options().get_lr(), 0.25);
}

// With the same gradients weights of two dimensions decay, and the others move as without a decay.
TEST(Optimizers, LeaveGroupsWithoutDecay) {
  torch::nn::Sequential net(torch::nn::Linear(3, 4), torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})));
  net->register_parameter("again", net->parameters()[0]);
  const auto groups = lockstep::decay_groups(*net);
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[0].params().size(), 1u);
  EXPECT_EQ(groups[1].params().size(), 3u);
  const auto start = torch::nn::utils::parameters_to_vector(net->parameters()).detach().clone();
  const auto moves = [&](const std::string& name, double weight_decay, bool all) {
    torch::nn::utils::vector_to_parameters(start.clone(), net->parameters());
    const auto optimizer = make_optimizer(optimizer_from(name), groups, {.lr = 0.1, .weight_decay = weight_decay});
    if (!all) lockstep::Optimizer::set_weight_decay(optimizer->param_groups()[1], 0);
    for (const int step : {1, 2}) {
      give_gradients(net->parameters(), step);
      optimizer->step();
    }
    std::vector<torch::Tensor> after;
    for (const auto& parameter : net->parameters()) after.push_back(parameter.detach().clone());
    return after;
  };
  for (const std::string name : {"sgd", "adam", "adamw", "lars", "lamb"}) {
    const auto none = moves(name, 0, true), all = moves(name, 0.5, true), some = moves(name, 0.5, false);
    for (size_t i = 0; i < some.size(); ++i) {
      const bool decays = some[i].dim() == 2;
      EXPECT_TRUE(torch::equal(some[i], decays ? all[i] : none[i])) << name << " " << i;
      EXPECT_FALSE(torch::equal(all[i], none[i])) << name << " " << i;
    }
  }
}

TEST(Optimizers, SetAWeightDecayOnlyWhereThereIsOne) {
  torch::optim::RMSprop rmsprop(some_weights(), torch::optim::RMSpropOptions(0.1));
  lockstep::Optimizer::set_weight_decay(rmsprop.param_groups()[0], 0.25);
  EXPECT_EQ(static_cast<torch::optim::RMSpropOptions&>(rmsprop.param_groups()[0].options()).weight_decay(), 0.25);
  EXPECT_THAT(error_of([&] { lockstep::Optimizer::set_weight_decay(rmsprop.param_groups()[0], -1); }), Refused());
  torch::optim::LBFGS lbfgs(some_weights());
  EXPECT_THAT(error_of([&] { lockstep::Optimizer::set_weight_decay(lbfgs.param_groups()[0], 0); }), Refused());
}

TEST(Optimizers, SayWhatTheyAre) {
  EXPECT_EQ(to_string(lockstep::OptimizerKind::sgd, OptimizerSettings{}), "sgd");
  EXPECT_EQ(to_string(lockstep::OptimizerKind::sgd,
                      OptimizerSettings{.momentum = 0.9, .nesterov = true, .weight_decay = 1e-4}),
            "sgd, momentum 0.9 (Nesterov), weight decay 1e-04");
}

TEST(Optimizers, RefuseWhatMakesNoSense) {
  const auto refused = [](const std::string& name, const OptimizerSettings& settings) {
    return error_of([&] { make_optimizer(optimizer_from(name), {some_weights()}, settings); });
  };
  EXPECT_THAT(refused("rmsprop", {}), Refused());
  EXPECT_THAT(refused("sgd", {.lr = -1}), Refused());
  EXPECT_THAT(refused("sgd", {.lr = INFINITY}), Refused());
  EXPECT_THAT(refused("sgd", {.momentum = 1}), Refused());
  EXPECT_THAT(refused("lars", {.momentum = std::nan("")}), Refused());
  EXPECT_THAT(refused("lamb", {.weight_decay = -0.1}), Refused());
  for (const char* name : {"adam", "adamw", "lamb"}) {
    EXPECT_THAT(refused(name, {.momentum = 0.9}), Refused());
  }
  EXPECT_THAT(refused("sgd", {.nesterov = true}), Refused());
  EXPECT_THAT(refused("lars", {.momentum = 0.9, .nesterov = true}), Refused());

  const auto weights = some_weights();
  EXPECT_THAT(error_of([&] { Lars(weights, LarsOptions(1).trust(-1)); }), Refused());
  EXPECT_THAT(error_of([&] { Lamb(weights, LambOptions().betas({0.9, 1})); }), Refused());
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(weights, std::make_unique<LambOptions>(-3.0));
  EXPECT_THAT(error_of([&] { Lamb{groups}; }), Refused());
  weights[0].mutable_grad() = torch::zeros_like(weights[0]).to_sparse();
  EXPECT_THAT(error_of([&] { Lars(weights, LarsOptions(1)).step(); }), Refused());
  EXPECT_THAT(error_of([&] { Lamb(weights).step(); }), Refused());
}

}  // namespace optimizers_test
