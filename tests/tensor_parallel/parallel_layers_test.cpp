// Labels: concurrency arithmetic 3x3 2x4
// Tensor parallelism's layers over 1 to 4 CPU ranks, against the same computed whole.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/tensor_parallel/parallel_layers.hpp>

#include "support/group_tests.hpp"

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {
namespace parallel_layers_test {

using torch::Tensor;

constexpr double kTolerance = 1e-12;

Tensor doubles(at::IntArrayRef sizes) {
  return torch::randn(sizes, torch::kDouble);
}

Tensor leaf(const Tensor& values) {
  return values.detach().clone().requires_grad_();
}

using ParallelLayersWorlds = Worlds;
INSTANTIATE_TEST_SUITE_P(Sizes, ParallelLayersWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

// A layer in slices against the whole one: results and all gradients. Slices of x and y go along dim, or they are whole
// without one.
template <class Whole, class Layer>
void expect_same_as_whole(Whole& whole, Layer& layer, Rank& rank, const Tensor& x_whole, std::optional<int64_t> x_dim,
                          std::optional<int64_t> y_dim) {
  const auto mine = [&](const Tensor& tensor, std::optional<int64_t> dim) {
    if (!tensor.defined()) return tensor;  // the gradient of what is frozen
    return dim ? slice_of(tensor, *dim, rank) : tensor.detach().to(rank.device());
  };
  whole->to(rank.device());
  layer->to(rank.device());
  const Tensor all_x = leaf(x_whole.to(rank.device())), x = leaf(mine(x_whole, x_dim));
  const Tensor all_y = whole->forward(all_x), y = layer->forward(x);
  expect_near(y.detach(), mine(all_y, y_dim), kTolerance, "y");
  const Tensor grad = torch::sin(all_y.detach() * 3);  // equal on all ranks
  all_y.backward(grad);
  y.backward(mine(grad, y_dim));
  expect_near(x.grad(), mine(all_x.grad(), x_dim), kTolerance, "x.grad");
  const auto wholes = whole->named_parameters();
  for (const auto& item : layer->named_parameters()) {
    const auto dim = layer->sliced_dimensions().find(item.key());
    const bool is_split = dim != layer->sliced_dimensions().end();
    const auto which = is_split ? std::optional(dim->second.dim) : std::nullopt;
    expect_near(item.value().grad(), mine(wholes[item.key()].grad(), which), kTolerance, item.key());
    if (!is_split && item.value().requires_grad()) expect_equal_on_all_ranks(item.value().grad(), rank, item.key());
  }
  EXPECT_EQ(layer->named_parameters().size(), wholes.size());
}

// Gives a rank a whole layer of its own to compare with, whose gradients the rank may write.
template <class Module>
std::shared_ptr<Module> own(const torch::nn::ModuleHolder<Module>& module) {
  return std::dynamic_pointer_cast<Module>(module->clone());
}

TEST_P(ParallelLayersWorlds, LinearLayersAreTheWholeOnes) {
  for (const bool bias : {true, false}) {
    for (const auto& [in, out] : {std::pair{8, 12}, std::pair{7, 5}, std::pair{4, 4}}) {
      SCOPED_TRACE(testing::Message() << in << " to " << out << (bias ? " with bias" : ""));
      torch::nn::Linear linear(torch::nn::LinearOptions(in, out).bias(bias));
      linear->to(torch::kDouble);
      const Tensor longer = doubles({2, 3, in});
      on_ranks([&](Rank& rank) {
        torch::nn::Linear whole(own(linear));
        ColumnParallelLinear column(whole, rank);
        expect_same_as_whole(whole, column, rank, longer, {}, -1);
        whole->zero_grad();
        RowParallelLinear row(whole, rank);
        expect_same_as_whole(whole, row, rank, longer, -1, {});
      });
    }
  }
}

TEST_P(ParallelLayersWorlds, ConvolutionsAreTheWholeOnes) {
  using Options = torch::nn::Conv2dOptions;
  const int world = GetParam();
  std::vector<Options> list{Options(12, 24, 3), Options(12, 12, {3, 2}).stride({2, 1}).padding({1, 0}).bias(false),
                            Options(12, 12, 3).padding(2).dilation(2), Options(24, 12, 3).padding(torch::kSame),
                            Options(12, 12, 1).stride(3)};
  for (const int64_t groups : {2, 3, 4, 12}) {
    if (groups % world == 0 || world % groups == 0) list.push_back(Options(12, 24, 3).padding(1).groups(groups));
  }
  for (const auto& options : list) {
    torch::nn::Conv2d conv(options);
    SCOPED_TRACE(testing::Message() << conv);
    conv->to(torch::kDouble);
    const Tensor x = doubles({2, options.in_channels(), 7, 8});
    on_ranks([&](Rank& rank) {
      torch::nn::Conv2d whole(own(conv));
      for (const bool slices : {false, true}) {
        const auto dim = slices ? std::optional<int64_t>(1) : std::nullopt;
        whole->zero_grad();
        OutputChannelParallelConv2d by_output(whole, rank, slices);
        expect_same_as_whole(whole, by_output, rank, x, dim, 1);
        if (options.groups() > 1 || !slices) continue;
        whole->zero_grad();
        InputChannelParallelConv2d by_input(whole, rank);
        expect_same_as_whole(whole, by_input, rank, x, dim, {});
      }
    });
  }
}

TEST_P(ParallelLayersWorlds, ConvReluPoolIsTheWholeOne) {
  ConvReluPool layer(12, 24, 3);
  layer->to(torch::kDouble);
  const Tensor x = doubles({2, 12, 7, 8});
  on_ranks([&](Rank& rank) {
    ConvReluPool whole(own(layer));
    for (const bool slices : {false, true}) {
      whole->zero_grad();
      const auto dim = slices ? std::optional<int64_t>(1) : std::nullopt;
      OutputChannelParallelConvReluPool part(whole, rank, slices);
      expect_same_as_whole(whole, part, rank, x, dim, 1);
    }
  });
}

TEST_P(ParallelLayersWorlds, BatchNormsAreTheWholeOnes) {
  for (const auto& momentum : {std::optional<double>(0.3), std::optional<double>()}) {
    torch::nn::BatchNorm2d channels(torch::nn::BatchNorm2dOptions(12).momentum(momentum));
    torch::nn::BatchNorm1d features(torch::nn::BatchNorm1dOptions(5).momentum(momentum));
    for (auto& tensor : channels->parameters()) torch::nn::init::normal_(tensor);
    channels->to(torch::kDouble);
    features->to(torch::kDouble);
    features->bias.requires_grad_(false);
    const Tensor images = doubles({3, 12, 4, 4}), x = doubles({6, 5});
    on_ranks([&](Rank& rank) {
      torch::nn::BatchNorm2d whole(own(channels));
      ParallelBatchNorm2d part(whole, rank);
      for (const bool training : {true, false}) {
        whole->zero_grad();
        part->zero_grad();
        whole->train(training);
        part->train(training);
        expect_same_as_whole(whole, part, rank, images, 1, 1);
        expect_near(part->running_var, slice_of(whole->running_var, 0, rank), kTolerance, "variance");
        EXPECT_EQ(part->num_batches_tracked.item<int64_t>(), 1);
      }
      torch::nn::BatchNorm1d whole_1d(own(features));
      whole_1d->bias.requires_grad_(false);
      ParallelBatchNorm1d part_1d(whole_1d, rank);
      EXPECT_FALSE(part_1d->bias.requires_grad());
      expect_same_as_whole(whole_1d, part_1d, rank, x, 1, 1);
    });
  }
}

// ---- Bad input -----------------------------------------------------------------------------------------------------

TEST(ParallelLayersTest, WhatDoesNotDivideIsAnErrorThatSaysWhatWouldFit) {
  EXPECT_THAT(error_on_ranks(3, [](Rank& rank) { OutputChannelParallelConv2d(torch::nn::Conv2d(1, 20, 3), rank); }),
              Refused());
  EXPECT_THAT(error_on_ranks(2, [](Rank& rank) { InputChannelParallelConv2d(torch::nn::Conv2d(1, 20, 3), rank); }),
              Refused());
  EXPECT_THAT(error_on_ranks(3, [](Rank& rank) { OutputChannelParallelConvReluPool(ConvReluPool(1, 20, 3), rank); }),
              Refused());
  EXPECT_THAT(error_on_ranks(3,
                             [](Rank& rank) {
                               torch::nn::Conv2d conv(torch::nn::Conv2dOptions(6, 6, 3).groups(2));
                               OutputChannelParallelConv2d part(conv, rank);
                             }),
              Refused());
  EXPECT_THAT(error_on_ranks(2,
                             [](Rank& rank) {
                               torch::nn::Conv2d conv(torch::nn::Conv2dOptions(6, 6, 3).groups(2));
                               InputChannelParallelConv2d part(conv, rank);
                             }),
              Refused());
  EXPECT_THAT(error_on_ranks(2,
                             [](Rank& rank) {
                               torch::nn::Conv2d conv(torch::nn::Conv2dOptions(6, 6, 3).padding_mode(torch::kReflect));
                               OutputChannelParallelConv2d part(conv, rank);
                             }),
              Refused());
  EXPECT_THAT(error_on_ranks(4, [](Rank& rank) { ColumnParallelLinear(torch::nn::Linear(8, 3), rank); }), Refused());
}

}  // namespace parallel_layers_test
}  // namespace lockstep
