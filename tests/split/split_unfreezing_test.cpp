// Layers of a pipeline that were frozen when the SplitModel was made, and are unfrozen later, train as on one device.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/split/split_model.hpp>

#include "support/group_tests.hpp"
#include "support/test_devices.hpp"

#include <string>
#include <vector>

namespace split_unfreezing_test {

using namespace lockstep;
namespace F = torch::nn::functional;
namespace nn = torch::nn;

const nn::Sequential start = [] {
  torch::manual_seed(1);
  nn::Sequential net(nn::Linear(5, 8), nn::Tanh(), nn::Linear(8, 6), nn::Tanh(), nn::Linear(6, 3));
  net->to(torch::kDouble);
  return net;
}();

const Dataset data = [] {
  torch::manual_seed(2);
  return Dataset{torch::randn({18, 5}, torch::kDouble), torch::arange(18) % 3};
}();

void train_from(const nn::Sequential& net, const std::string& first_layer) {
  for (auto& item : net->named_parameters()) item.value().requires_grad_(item.key().substr(0, 1) >= first_layer);
}

const std::vector<std::string> first_layers = {"4", "2", "0", "4", "0"};  // in each epoch
const auto settings = torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.1);

TEST(SplitUnfreezing, OfAPipelineIsExact) {
  nn::Sequential expected = copy_of(start);
  torch::optim::SGD sgd(expected->parameters(), settings);
  for (size_t epoch = 0; epoch < first_layers.size(); ++epoch) {
    train_from(expected, first_layers[epoch]);
    for (auto& batch : batches(data, {.size = 6, .epoch = static_cast<int64_t>(epoch)})) {
      sgd.zero_grad();
      F::cross_entropy(expected->forward(batch.x), batch.y).backward();
      sgd.step();
    }
  }
  for (const MeshShape& mesh : {MeshShape{.pipeline = 3}, MeshShape{.data = 2, .pipeline = 2}}) {
    run(test_devices(static_cast<size_t>(mesh.size())), [&](Rank& rank) {
      const nn::Sequential layers = copy_of(start);
      train_from(layers, first_layers[0]);
      SplitModel net(layers, rank, {.mesh = mesh, .microbatches = 3});
      Optimizer optimizer(net, settings);
      for (size_t epoch = 0; epoch < first_layers.size(); ++epoch) {
        train_from(layers, first_layers[epoch]);
        for (auto& batch : batches(data, {.size = 6, .epoch = static_cast<int64_t>(epoch)}, net.mesh().data())) {
          optimizer.zero_grad();
          net.loss(batch, F::cross_entropy).backward();
          optimizer.step();
        }
      }
      nn::Sequential whole = copy_of(start);
      net.gather(whole);
      for (const auto& item : whole->named_parameters())
        expect_near(item.value().detach(), expected->named_parameters()[item.key()].detach(), 1e-12, item.key());
    });
  }
}

}  // namespace split_unfreezing_test
