// fit() refuses what it cannot train: tasks, networks, functions and updates.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/optim/decay_groups.hpp>
#include <lockstep/trainer/fit.hpp>

#include "support/error_of.hpp"
#include "support/scratch_folder.hpp"
#include "support/test_devices.hpp"

#include <cstdlib>
#include <memory>
#include <vector>

namespace fit_refusals_test {

using namespace lockstep;
using torch::Tensor;
namespace F = torch::nn::functional;
namespace nn = torch::nn;

Dataset curve(int64_t samples) {
  const Tensor x = torch::randn({samples, 4}, torch::kDouble);
  return {x, (x.select(1, 0) * x.select(1, 1)).unsqueeze(1)};
}

Task regression() {
  return {
      .name = "regressor",
      .module =
          [] {
            nn::Linear net(4, 1);
            net->to(torch::kDouble);
            return net;
          },
      .criterion = [](const Tensor& y_hat, const Tensor& y) { return (y_hat - y).square().mean(); },
      .train = curve(100),
      .test = curve(31),
      .metrics = {{.name = "mae", .of = [](const Tensor& y_hat, const Tensor& y) { return (y_hat - y).abs().mean(1); }},
                  {.name = "bias", .of = [](const Tensor& y_hat, const Tensor& y) { return (y_hat - y).mean(); }}}};
}

TrainOptions settings(int ranks) {
  TrainOptions options;
  options.devices = test_devices(static_cast<size_t>(ranks));
  options.batch.size = 16;
  options.rate.lr = 0.05;
  options.epochs = 3;
  return options;
}

Caught refused(const Task& task, const TrainOptions& options = settings(2)) {
  return error_of([&] { fit(task, options); });
}

// Gives what is wrong with the regression once `change` is done with it.
template <class Change>
Caught refused_with(const Change& change) {
  Task task = regression();
  TrainOptions options = settings(2);
  change(task, options);
  return refused(task, options);
}

TEST(FitRefuses, WhatItCannotBegin) {
  const auto with = [](const auto& change) { return refused_with(change); };
  EXPECT_THAT(with([](Task& task, auto&) { task.name = "lenet"; }), Refused("name"));
  EXPECT_THAT(with([](Task& task, auto&) { task.train = {}; }), Refused("train"));
  EXPECT_THAT(with([](Task& task, auto&) { task.patience = -1; }), Refused("patience"));
  EXPECT_THAT(with([](Task& task, auto&) { task.test = {}; }), Refused("test"));
  EXPECT_THAT(with([](Task& task, auto&) { task.best_by = "mse"; }), Refused("best_by"));
  EXPECT_THAT(with([](Task& task, auto&) { task.best_by = "accuracy"; }), Refused("best_by", "accuracy"));
  EXPECT_THAT(with([](Task& task, auto&) { task.metrics[1].name = "mae"; }), Refused("metrics"));
  EXPECT_THAT(with([](Task& task, auto&) { task.metrics[0].name = "loss"; }), Refused("metrics"));
  EXPECT_THAT(with([](Task& task, auto&) { task.metrics[0].of = lockstep::detail::SampleFunction(); }),
              Refused("metrics"));
  EXPECT_THAT(with([](auto&, TrainOptions& options) { options.model.name = "mlp"; }), Refused("model", "data"));
  EXPECT_THAT(with([](auto&, TrainOptions& options) { options.batch.size = 101; }), Refused("batch_size"));
  EXPECT_THAT(with([](auto&, TrainOptions& options) { options.memory_format = MemoryFormat::channels_last; }),
              Refused("memory_format"));
}

TEST(FitRefuses, NetworksThatAreNone) {
  const auto with = [](const auto& change) { return refused_with(change); };
  EXPECT_THAT(with([](Task& task, auto&) { task.module = [] { return std::shared_ptr<nn::LinearImpl>(); }; }),
              Refused("module"));
  EXPECT_THAT(with([](Task& task, auto&) { task.module = [] { return nn::Sequential(); }; }), Refused("module"));
  EXPECT_THAT(with([](auto&, TrainOptions& options) { options.way = SplitNetwork{{.mesh = {.pipeline = 2}}}; }),
              Refused("split"));
  EXPECT_THAT(with([](auto&, TrainOptions& options) { options.sync_batchnorm = true; }), Refused("sync_batchnorm"));
}

TEST(FitRefuses, WhatFunctionsMustNotGive) {
  const auto with = [](const auto& change) { return refused_with(change); };
  EXPECT_THAT(with([](Task& task, auto&) {
                task.criterion = [](const Tensor& y_hat, const Tensor& y) { return (y_hat - y).square(); };
              }),
              Refused("criterion"));
  const auto spread = [](const Tensor& y_hat, const Tensor& y) { return (y_hat - y).var(); };
  EXPECT_THAT(with([&](Task& task, auto&) { task.criterion = spread; }), Refused("criterion"));
  EXPECT_EQ(with([&](Task& task, auto&) { task.criterion = lockstep::Criterion::unchecked(spread); }), "(no error)");
  EXPECT_THAT(with([](Task& task, auto&) {
                task.metrics[0].of = [](const Tensor& y_hat, const Tensor& y) { return y_hat - y; };
              }),
              Refused("metrics"));
  EXPECT_THAT(with([](Task& task, auto&) { task.accuracy = true; }), Refused("accuracy"));
  EXPECT_THAT(with([](Task& task, auto&) {
                task.train = Samples(100, [](const std::vector<int64_t>&) {
                  return Dataset{torch::zeros({3, 4}, torch::kDouble), torch::zeros({3, 1}, torch::kDouble)};
                });
              }),
              Refused());
}

// LibTorch says that two types differ, and not what they are of.
TEST(FitRefuses, SamplesOfAnotherTypeThanTheNetworkAreNamed) {
  const auto error_with = [](const Tensor& x, torch::ScalarType of_net, int64_t grain = 0) {
    Task task{.name = "classes",
              .module =
                  [of_net] {
                    nn::Sequential net(nn::Flatten(), nn::Linear(16, 3));
                    net->to(of_net);
                    return net;
                  },
              .criterion = F::cross_entropy,
              .train = Dataset{x, torch::arange(24).remainder(3)}};
    TrainOptions options = settings(2);
    if (grain > 0) options.batch.grain = grain;
    return error_of([&] { fit(task, options); });
  };
  const Tensor bytes = torch::arange(24 * 16).view({24, 1, 4, 4}).to(torch::kByte);
  EXPECT_THAT(error_with(bytes, torch::kDouble), Refused("train", "module"));
  for (const int64_t grain : {0, 4}) {
    EXPECT_THAT(error_with(bytes.to(torch::kDouble), torch::kFloat, grain), Refused("train", "module"));
  }
  EXPECT_EQ(error_with(bytes, torch::kFloat), "(no error)");
}

TEST(FitRefuses, UpdatesThatAreNone) {
  const auto make_adam = [](const Task::Groups& groups) { return std::make_unique<torch::optim::Adam>(groups); };
  const auto with = [](const auto& change) { return refused_with(change); };
  EXPECT_THAT(with([](Task& task, auto&) { task.ema_decay = 1; }), Refused("ema_decay"));
  EXPECT_THAT(with([](Task& task, auto&) { task.optimizer = [](auto) { return nullptr; }; }), Refused("optimizer"));
  EXPECT_THAT(with([](Task& task, auto&) {
                task.optimizer = [](const Task::Groups& groups) {
                  auto parameters = groups.at(0).params();
                  parameters.pop_back();
                  return std::make_unique<torch::optim::Adam>(parameters);
                };
              }),
              Refused("optimizer"));
  EXPECT_THAT(with([](Task& task, auto&) { task.groups = decay_groups; }), Refused("groups"));
  for (const int stage : {0, 1, 3}) {
    const auto with_groups = [&](const auto& groups) {
      return with([&](Task& task, TrainOptions& options) {
        task.optimizer = make_adam;
        task.groups = groups;
        options.way = static_cast<Sharded>(stage);
      });
    };
    EXPECT_THAT(with_groups([](const nn::Module& net) {
                  auto groups = decay_groups(net);
                  groups.pop_back();
                  return groups;
                }),
                Refused("groups"));
    EXPECT_THAT(with_groups([](const nn::Module& net) {
                  auto groups = decay_groups(net);
                  groups.push_back(groups[0]);
                  return groups;
                }),
                Refused("groups"));
  }
  const ScratchFolder folder;
  Task task = regression();
  TrainOptions options = settings(1);
  options.keep.run_dir = folder / "run";
  task.ema_decay = 0.9;
  fit(task, options);
  options.epochs = 4;
  options.keep.resume = options.keep.run_dir;
  task.ema_decay = 0.8;
  EXPECT_THAT(error_of([&] { fit(task, options); }), Refused("ema_decay"));
}

}  // namespace fit_refusals_test
