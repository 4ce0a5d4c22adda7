// Labels: concurrency
// The wing book and the core do the same: train_batch on lists, DataParallel and SGD on ranks, step by step.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/models/models.hpp>
#include <lockstep/scratch/train_batch.hpp>

#include "support/test_devices.hpp"

#include <algorithm>
#include <vector>

namespace storeys_test {

using lockstep::Rank;
using Params = std::vector<torch::Tensor>;

constexpr double lr = 0.2;
constexpr int64_t samples = 17;

// Larger than the section's weights, so that gradients reach every layer.
Params random_params() {
  Params params;
  for (const auto& param : lockstep::lenet_params())
    params.push_back(torch::randn(param.sizes(), torch::kDouble) * 0.1);
  return params;
}

// The module's tensors in the list's order and layout.
Params as_list(const lockstep::LeNetImpl& net) {
  return {net.conv1->weight,   net.conv1->bias, net.conv2->weight,   net.conv2->bias,
          net.fc1->weight.t(), net.fc1->bias,   net.fc2->weight.t(), net.fc2->bias};
}

// Weights and gradients after every step.
struct Step {
  Params weights, gradients;
};

std::vector<Step> by_train_batch(const Params& start, const lockstep::Dataset& data, int64_t batch_size, int world) {
  const lockstep::Devices devices = lockstep::test_devices(world);
  std::vector<Params> device_params;
  for (const auto& device : devices) device_params.push_back(lockstep::get_params(start, device));
  std::vector<Step> steps;
  for (const auto& batch : lockstep::batches(data, {.size = batch_size, .seed = 5})) {
    lockstep::train_batch(batch.x, batch.y, device_params, devices, lr);
    steps.emplace_back();
    for (const auto& param : device_params.back()) {
      steps.back().weights.push_back(param.detach().clone());
      steps.back().gradients.push_back(param.grad().clone());
    }
  }
  return steps;
}

std::vector<Step> by_data_parallel(const Params& start, const lockstep::Dataset& data, int64_t batch_size, int world) {
  std::vector<Step> steps;
  lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
    lockstep::LeNet module;
    module->to(torch::kDouble);
    lockstep::load_lenet_params(module, start);
    lockstep::DataParallel net(module, rank);
    torch::optim::SGD sgd(net->parameters(), lr);
    for (const auto& batch : lockstep::batches(data, {.size = batch_size, .seed = 5}, rank)) {
      sgd.zero_grad();
      net.loss(batch, torch::nn::functional::cross_entropy).backward();
      sgd.step();
      if (rank.index() != rank.world_size() - 1) continue;
      steps.emplace_back();
      for (const auto& param : as_list(*net)) steps.back().weights.push_back(param.detach().clone());
      const Params gradients = {net->conv1->weight.grad(),   net->conv1->bias.grad(),     net->conv2->weight.grad(),
                                net->conv2->bias.grad(),     net->fc1->weight.grad().t(), net->fc1->bias.grad(),
                                net->fc2->weight.grad().t(), net->fc2->bias.grad()};
      for (const auto& gradient : gradients) steps.back().gradients.push_back(gradient.clone());
    }
  });
  return steps;
}

double largest_difference(const Params& a, const Params& b) {
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) largest = std::max(largest, (a[i] - b[i]).abs().max().item<double>());
  return largest;
}

TEST(Storeys, AgreeOnWeightsAndGradientsAfterEveryStep) {
  torch::manual_seed(0);
  const Params start = random_params();
  const lockstep::Dataset data{torch::rand({samples, 1, 28, 28}, torch::kDouble), torch::randint(10, {samples})};
  for (int world = 1; world <= 4; ++world) {
    for (const int64_t batch_size : {17, 8, 7}) {  // the last batches: 17, 1 (some ranks get nothing) and 3 samples
      SCOPED_TRACE(testing::Message() << world << " ranks, batches of " << batch_size);
      const auto first = by_train_batch(start, data, batch_size, world);
      const auto second = by_data_parallel(start, data, batch_size, world);
      ASSERT_EQ(first.size(), static_cast<size_t>((samples + batch_size - 1) / batch_size));
      ASSERT_EQ(second.size(), first.size());
      for (size_t i = 0; i < first.size(); ++i) {
        EXPECT_LT(largest_difference(first[i].weights, second[i].weights), 1e-12) << "step " << i;
        EXPECT_LT(largest_difference(first[i].gradients, second[i].gradients), 1e-12) << "step " << i;
        EXPECT_GT(first[i].gradients[0].abs().max().item<double>(), 1e-4);
      }
    }
  }
}

}  // namespace storeys_test
