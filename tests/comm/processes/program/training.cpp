#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/lab/optimizers.hpp>
#include <lockstep/models/models.hpp>
#include <lockstep/nn/weights.hpp>
#include <lockstep/optim/decay_groups.hpp>
#include <lockstep/ranks/evaluate.hpp>
#include <lockstep/ranks/rank.hpp>
#include <lockstep/survive/elastic.hpp>
#include <lockstep/trainer/fit.hpp>

#include "scenarios.hpp"
#include "support/split_training.hpp"

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>

// Batches that split unevenly, and a last one that is smaller than the number of ranks.
void scenarios::training(const Setup& setup) {
  const auto data = lockstep::synthetic_images(97, 10);
  lockstep::run(setup.devices, [&](lockstep::Rank& rank) {
    lockstep::DataParallel net(lockstep::LeNet(3), rank);
    torch::optim::SGD sgd(net->parameters(), /*lr=*/0.1);
    for (int epoch = 1; epoch <= 2; ++epoch) {
      for (auto& batch : lockstep::batches(data.train, {.size = 32, .seed = 0, .epoch = epoch}, rank)) {
        sgd.zero_grad();
        net.loss(batch, torch::nn::functional::cross_entropy).backward();
        sgd.step();
      }
    }
    const auto score = lockstep::evaluate([&](auto& x) { return net(x); }, data.test, rank);
    if (score.total != 10) throw std::runtime_error("the evaluation has not seen every sample once");
    if (rank.index() == rank.world_size() - 1) lockstep::save_weights(setup.argument, *net);
  });
}

// In an elastic job its epochs take long enough that processes can go and come.
void scenarios::fits(const Setup& setup) {
  torch::manual_seed(1);
  const auto x = torch::randn({40, 4}), y = (x.sum(1) > 0).to(torch::kLong);
  const lockstep::Task task{.name = "signs",
                            .module =
                                [] {
                                  namespace nn = torch::nn;
                                  return nn::Sequential(nn::Linear(4, 8), nn::Tanh(),
                                                        nn::LayerNorm(nn::LayerNormOptions({8})), nn::Linear(8, 2));
                                },
                            .criterion = torch::nn::functional::cross_entropy,
                            .train = {{x, y}},
                            .test = {{x, y}},
                            .accuracy = true,
                            .optimizer =
                                [](const auto& groups) {
                                  auto adamw = lockstep::make_optimizer(lockstep::OptimizerKind::adamw, groups,
                                                                        {.weight_decay = 0.1});
                                  lockstep::Optimizer::set_weight_decay(adamw->param_groups()[1], 0);
                                  return adamw;
                                },
                            .groups = lockstep::decay_groups};
  lockstep::TrainOptions options{.devices = setup.devices,
                                 .batch = {.size = 16, .grain = 4},
                                 .rate = {.lr = 0.01},
                                 .epochs = 60,
                                 .keep = {.run_dir = setup.argument}};
  if (setup.argument.ends_with("sliced")) options.way = lockstep::Sharded::gradients;
  const auto pause = std::chrono::milliseconds(std::getenv("LOCKSTEP_ELASTIC_MEMBER") != nullptr ? 50 : 0);
  lockstep::fit(task, options, {.on_epoch = [&](const lockstep::EpochMetrics& metrics) {
                  std::cout << "epoch " << metrics.epoch << " done" << std::endl;
                  std::this_thread::sleep_for(pause);
                }});
}

void scenarios::own_loop(const Setup& setup) {
  const bool alone = setup.argument.starts_with("alone ");
  torch::manual_seed(1);
  const auto x = torch::randn({40, 4}), y = (x.sum(1) > 0).to(torch::kLong);
  const int64_t grain = setup.argument == "no grain" ? 0 : 4, steps = grain == 0 ? 1 : 80;
  // The module and the count outlive a generation of processes.
  torch::nn::Linear module(4, 2);
  int64_t done = 0;
  const lockstep::RunOptions options{.succession = lockstep::elastic};
  lockstep::run(
      setup.devices,
      [&](lockstep::Rank& rank) {
        const auto all = rank.allgather(torch::tensor({done}));
        const int farthest = static_cast<int>(all.argmax().item<int64_t>());
        for (auto& parameter : module->parameters()) rank.broadcast(parameter.detach(), farthest);
        done = all.max().item<int64_t>();
        const bool sliced = setup.argument == "sliced";
        lockstep::DataParallel net(module, rank,
                                   {.sharded = sliced ? lockstep::Sharded::state : lockstep::Sharded::nothing});
        torch::optim::SGD sgd(net->parameters(), /*lr=*/0.1);
        while (done < steps && !lockstep::regroups(rank)) {
          const lockstep::BatchOptions order{
              .size = 40, .seed = 0, .epoch = static_cast<int>(done) + 1, .grain = grain};
          for (auto& batch : lockstep::batches({x, y}, order, rank)) {
            sgd.zero_grad();
            net.loss(batch, torch::nn::functional::cross_entropy).backward();
            sgd.step();
          }
          ++done;
          if (rank.index() == 0) std::cout << "step " << done << " of " << rank.world_size() << " ranks" << std::endl;
          std::this_thread::sleep_for(std::chrono::milliseconds(alone ? 0 : 50));
        }
        if (done == steps && rank.index() == 0) lockstep::save_weights(setup.argument.substr(alone ? 6 : 0), *module);
      },
      options);
}

void scenarios::random_nets(const Setup& setup) {
  std::istringstream words(setup.argument);
  lockstep::ModelSplit split;
  char by = 0;
  std::string file;
  words >> split.mesh.data >> by >> split.mesh.pipeline >> file;
  const auto bits = lockstep::bits_of_random_nets(setup.devices, split);
  if (!bits.empty()) std::ofstream(file) << bits;
}
