// Labels: concurrency arithmetic
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/models/models.hpp>

#include "data/parts.hpp"
#include "support/error_of.hpp"
#include "support/test_devices.hpp"

#include <cstdint>
#include <utility>
#include <vector>

namespace lockstep {
namespace lenet_test {

TEST(LeNetParams, HaveTheSectionsShapes) {
  const auto params = lenet_params();
  const std::vector<std::vector<int64_t>> shapes = {{20, 1, 3, 3}, {20},  {50, 20, 5, 5}, {50},
                                                    {800, 128},    {128}, {128, 10},      {10}};
  ASSERT_EQ(params.size(), shapes.size());
  for (size_t i = 0; i < shapes.size(); ++i) {
    EXPECT_EQ(params[i].sizes(), at::IntArrayRef(shapes[i]));
    EXPECT_EQ(params[i].scalar_type(), torch::kFloat);
    EXPECT_FALSE(params[i].requires_grad());
  }
}

TEST(LeNetParams, AreSmallNormalWeightsAndZeroBiases) {
  const auto params = lenet_params(3);
  for (size_t i : {1, 3, 5, 7}) EXPECT_EQ(params[i].count_nonzero().item<int64_t>(), 0);
  for (size_t i : {2, 4}) {  // the two with enough values to measure
    EXPECT_NEAR(params[i].std().item<double>(), 0.01, 2e-4);
    EXPECT_NEAR(params[i].mean().item<double>(), 0, 2e-4);
    EXPECT_GT(params[i].abs().max().item<double>(), 0.03);
  }
}

TEST(LeNetParams, DependOnTheSeedAlone) {
  const auto before = lenet_params(7);
  torch::manual_seed(99);
  torch::randn({5});
  const auto again = lenet_params(7);
  const auto other = lenet_params(8);
  for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(before[i].equal(again[i]));
  for (size_t i : {0, 2, 4, 6}) EXPECT_FALSE(before[i].equal(other[i]));
}

TEST(LeNet, ModuleStartsWithTheListsWeights) {
  LeNet net(5);
  const auto params = lenet_params(5);
  EXPECT_TRUE(net->conv1->weight.equal(params[0]));
  EXPECT_TRUE(net->conv2->weight.equal(params[2]));
  EXPECT_TRUE(net->fc1->weight.equal(params[4].t()));
  EXPECT_TRUE(net->fc2->weight.equal(params[6].t()));
  const auto names = net->named_parameters().keys();
  EXPECT_THAT(names, testing::ElementsAre("conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias", "fc1.weight",
                                          "fc1.bias", "fc2.weight", "fc2.bias"));
}

// Weights and biases that are not small, so that every ReLU passes some values and every bias matters.
std::vector<torch::Tensor> random_params(torch::Dtype type) {
  std::vector<torch::Tensor> params;
  for (const auto& p : lenet_params()) params.push_back((torch::randn(p.sizes(), type) * 0.1).requires_grad_());
  return params;
}

void expect_list_and_module_agree(torch::Dtype type, int64_t samples, double tolerance) {
  const auto params = random_params(type);
  LeNet net;
  net->to(type);
  load_lenet_params(net, params);
  const auto x = torch::rand({samples, 1, 28, 28}, type);
  const auto y = torch::randint(10, {samples}, torch::kLong);

  const auto list_logits = lenet(x, params);
  const auto module_logits = net->forward(x);
  EXPECT_EQ(list_logits.sizes(), at::IntArrayRef({samples, 10}));
  EXPECT_TRUE(list_logits.allclose(module_logits, tolerance, tolerance));

  torch::nn::functional::cross_entropy(list_logits, y).backward();
  torch::nn::functional::cross_entropy(module_logits, y).backward();
  const auto parameters = net->parameters();
  for (size_t i = 0; i < params.size(); ++i) {
    const auto grad = i == 4 || i == 6 ? parameters[i].grad().t() : parameters[i].grad();
    EXPECT_TRUE(params[i].grad().allclose(grad, tolerance, tolerance)) << "parameter " << i;
    EXPECT_GT(grad.abs().max().item<double>(), 1e-6);
  }
}

TEST(LeNet, ListAndModuleAgreeInDouble) {
  for (int seed = 0; seed < 3; ++seed) {
    torch::manual_seed(seed);
    expect_list_and_module_agree(torch::kDouble, 1 + 3 * seed, 1e-12);
  }
}

TEST(LeNet, ListAndModuleAgreeInFloat) {
  torch::manual_seed(1);
  for (int64_t samples : {1, 9, 128}) expect_list_and_module_agree(torch::kFloat, samples, 1e-5);
}

TEST(LeNet, ComputesWhatTheSectionSays) {
  torch::manual_seed(2);
  const auto p = random_params(torch::kDouble);
  const auto x = torch::rand({2, 1, 28, 28}, torch::kDouble);
  // The convolutions as sums over windows, the pooling as a mean over reshaped blocks.
  const auto conv = [](const torch::Tensor& in, const torch::Tensor& w, const torch::Tensor& b) {
    const auto windows = in.unfold(2, w.size(2), 1).unfold(3, w.size(3), 1);
    return torch::einsum("nchwij,ocij->nohw", {windows, w}) + b.view({1, -1, 1, 1});
  };
  const auto pool = [](const torch::Tensor& in) {
    const int64_t blocks = in.size(2) / 2;  // a last row and column that fill no block are dropped
    const auto even = in.narrow(2, 0, 2 * blocks).narrow(3, 0, 2 * blocks);
    return even.reshape({in.size(0), in.size(1), blocks, 2, blocks, 2}).mean({3, 5});
  };
  const auto h1 = pool(conv(x, p[0], p[1]).clamp_min(0));
  const auto h2 = pool(conv(h1, p[2], p[3]).clamp_min(0)).reshape({2, 800});
  const auto expected = (h2.matmul(p[4]) + p[5]).clamp_min(0).matmul(p[6]) + p[7];
  EXPECT_TRUE(lenet(x, p).allclose(expected, 1e-11, 1e-12));
}

TEST(LeNet, TakesAnEmptyBatch) {
  LeNet net;
  EXPECT_EQ(lenet(torch::zeros({0, 1, 28, 28}), lenet_params()).sizes(), at::IntArrayRef({0, 10}));
  EXPECT_EQ(net->forward(torch::zeros({0, 1, 28, 28})).sizes(), at::IntArrayRef({0, 10}));
}

std::vector<torch::Tensor> trained_weights(int ranks, int64_t samples, torch::Dtype type) {
  torch::manual_seed(3);
  const auto x = torch::rand({samples, 1, 28, 28}, type), y = torch::randint(10, {samples}, torch::kLong);
  std::vector<torch::Tensor> weights;
  run(test_devices(ranks), [&](Rank& rank) {
    LeNet module(1);
    module->to(type);
    DataParallel net(module, rank);
    torch::optim::SGD sgd(net->parameters(), 0.1);
    const auto part = part_of(samples, rank.index(), ranks);
    const Batch mine{x.slice(0, part.begin, part.end).to(rank.device()),
                     y.slice(0, part.begin, part.end).to(rank.device()), samples};
    for (int step = 0; step < 3; ++step) {
      sgd.zero_grad();
      net.loss(mine, torch::nn::functional::cross_entropy).backward();
      sgd.step();
    }
    if (rank.index() != 0) return;
    for (const auto& parameter : net->parameters()) weights.push_back(parameter.detach().cpu().clone());
  });
  return weights;
}

// With one sample two ranks compute an empty part.
TEST(LeNet, TrainsOnSeveralDevicesAsOnOne) {
  for (const auto& [type, tolerance] : {std::pair{torch::kDouble, 1e-12}, std::pair{torch::kFloat, 1e-5}}) {
    for (const int64_t samples : {7, 1}) {
      const auto alone = trained_weights(1, samples, type), together = trained_weights(3, samples, type);
      for (size_t i = 0; i < alone.size(); ++i)
        EXPECT_TRUE(together.at(i).allclose(alone[i], tolerance, tolerance)) << samples << " samples, parameter " << i;
    }
  }
}

TEST(LeNet, RefusesOtherImagesAndWeights) {
  LeNet net;
  EXPECT_THAT(error_of([] { lenet(torch::zeros({2, 1, 28, 27}), lenet_params()); }), Refused());
  EXPECT_THAT(error_of([&] { net->forward(torch::zeros({2, 28, 28})); }), Refused());
  EXPECT_THAT(error_of([] { lenet(torch::Tensor(), lenet_params()); }), Refused());

  auto params = lenet_params();
  params[4] = params[4].t();
  EXPECT_THAT(error_of([&] { lenet(torch::zeros({2, 1, 28, 28}), params); }), Refused());
  params.pop_back();
  EXPECT_THAT(error_of([&] { load_lenet_params(net, params); }), Refused());
}

}  // namespace lenet_test
}  // namespace lockstep
