// Labels: concurrency 2x2 2x4
// Dropout in a split network: the same masks, and so the same weights, as on one device.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/split/split_model.hpp>

#include <string>
#include <vector>

#include "support/dropout_training.hpp"

namespace lockstep {
namespace split_dropout_test {

using torch::Tensor;
using torch::nn::Sequential;
namespace F = torch::nn::functional;

using SplitDropoutWorlds = DropoutTraining;
INSTANTIATE_TEST_SUITE_P(Sizes, SplitDropoutWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

// By layers, by channels, and by data beside them; with forwards that are computed twice.
TEST_P(SplitDropoutWorlds, TrainAsOneDevice) {
  const int ranks = GetParam();
  std::vector<ModelSplit> splits = {{.mesh = {.pipeline = ranks}, .microbatches = 3},
                                    {.mesh = {.pipeline = ranks}, .microbatches = 2, .recompute = true},
                                    {.mesh = {.tensor = ranks}}};
  if (ranks == 4) splits.push_back({.mesh = {.data = 2, .pipeline = 2}, .microbatches = 2});
  if (ranks == 4) splits.push_back({.mesh = {.data = 2, .tensor = 2}});
  for (const auto& split : splits) {
    SCOPED_TRACE(to_string(split));
    on_seeded_ranks(ranks, [&](Rank& rank) {
      SplitModel net(copy_of(start_), rank, split);
      Optimizer sgd(net, torch::optim::SGDOptions(0.1).momentum(0.9));
      for (auto& batch : batches(data_, batches_, net.mesh().data())) {
        sgd.zero_grad();
        net.loss(batch, [](const Tensor& y_hat, const Tensor& y) { return F::cross_entropy(y_hat, y); }).backward();
        sgd.step();
      }
      Sequential whole = rank.in_turn(make_net);
      net.gather(whole);
      expect_trained(whole->named_parameters());
    });
  }
}

}  // namespace split_dropout_test
}  // namespace lockstep
