// A training with dropout: one device's results, for tests of all ways to share it out.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/nn/dropout.hpp>
#include <lockstep/nn/sample_scope.hpp>
#include <lockstep/ranks/rank.hpp>

#include "group_tests.hpp"
#include "nn/random_layers.hpp"
#include "small_nets.hpp"
#include "test_devices.hpp"

#include <cstdint>
#include <functional>
#include <string>

namespace lockstep {

class DropoutTraining : public Worlds {
 public:
  static constexpr int64_t kSeed = 7;

 protected:
  DropoutTraining() : data_{torch::randn({24, 6}, torch::kDouble), torch::randint(4, {24})}, start_(make_net()) {
    torch::nn::Sequential net = copy_of(start_);
    train_alone(net);
    expected_ = net->named_parameters();
  }

  static torch::nn::Sequential make_net() {
    torch::nn::Sequential net({{"fc1", torch::nn::Linear(6, 12)},
                               {"tanh1", torch::nn::Tanh()},
                               {"drop1", Dropout(0.3)},
                               {"fc2", torch::nn::Linear(12, 8)},
                               {"tanh2", torch::nn::Tanh()},
                               {"drop2", Dropout(0.5)},
                               {"fc3", torch::nn::Linear(8, 4)}});
    net->to(torch::kDouble);
    return net;
  }

  static void on_seeded_ranks(int ranks, const std::function<void(Rank&)>& body) {
    run(test_devices(ranks), body, {.seed = kSeed});
  }

  void expect_trained(const torch::OrderedDict<std::string, at::Tensor>& parameters) const {
    for (const auto& item : expected_) {
      expect_near(parameters[item.key()].detach(), item.value().detach(), 1e-10, item.key());
    }
  }

  const BatchOptions batches_{.size = 11, .seed = 5};  // batches of 24 samples: 11, 11 and 2
  const Dataset data_;
  const torch::nn::Sequential start_;

 private:
  // Trains as a user's program does on one device.
  void train_alone(torch::nn::Sequential& net) const {
    name_dropouts(*net);
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    int64_t step = 0;
    for (auto& batch : batches(data_, batches_)) {
      const SampleScope scope({.seed = kSeed, .step = step++, .first = 0, .size = batch.size()});
      sgd.zero_grad();
      torch::nn::functional::cross_entropy(net->forward(batch.x), batch.y).backward();
      sgd.step();
    }
  }

  torch::OrderedDict<std::string, at::Tensor> expected_;
};

}  // namespace lockstep
