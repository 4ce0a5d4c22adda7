// A net trained on one device, and the same net trained in the ranks' parts, compared in everything.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/tensor_parallel/parallel_layers.hpp>

#include "group_tests.hpp"
#include "tensor_parallel/shard.hpp"
#include "test_devices.hpp"

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

constexpr double kTolerance = 1e-12;  // in float64

struct TrainingBatch {
  at::Tensor x, y;
};

// The results of training the net on one device.
struct Trained {
  std::vector<at::Tensor> results, input_gradients;
  std::vector<torch::nn::Sequential> gradients;  // nets whose .grad are those of each step
  torch::nn::Sequential net;
};

inline Trained train_whole(const torch::nn::Sequential& start, const std::vector<TrainingBatch>& batches) {
  Trained trained;
  trained.net = copy_of(start);
  torch::optim::SGD sgd(trained.net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  for (const auto& batch : batches) {
    sgd.zero_grad();
    const at::Tensor x = batch.x.clone().requires_grad_();
    const at::Tensor result = trained.net->forward(x);
    torch::nn::functional::cross_entropy(result, batch.y).backward();
    trained.results.push_back(result.detach());
    trained.input_gradients.push_back(x.grad());
    torch::nn::Sequential gradients = copy_of(trained.net);
    auto copies = gradients->named_parameters();
    for (auto& item : trained.net->named_parameters()) {
      copies[item.key()].mutable_grad() = item.value().grad().defined() ? item.value().grad().clone() : at::Tensor();
    }
    trained.gradients.push_back(gradients);
    sgd.step();
  }
  return trained;
}

inline void expect_whole_parameters_equal_on_all_ranks(const torch::nn::Sequential& part, Rank& rank) {
  const auto split = sliced_dimensions_of(part);
  for (const auto& item : part->named_parameters()) {
    if (split.contains(item.key())) continue;
    expect_equal_on_all_ranks(item.value(), rank, item.key());
    if (item.value().grad().defined()) expect_equal_on_all_ranks(item.value().grad(), rank, item.key() + ".grad");
  }
}

// Does what unshard() does, to the gradients; a parameter without one has none in `net` either.
inline void unshard_gradients(const torch::nn::Sequential& part, Rank& rank, torch::nn::Sequential& net) {
  const torch::NoGradGuard no_grad;
  const auto split = sliced_dimensions_of(part);
  const auto mine = part->named_parameters();
  for (const auto& item : net->named_parameters()) {
    at::Tensor whole = item.value();
    const at::Tensor& gradient = mine[item.key()].grad();
    whole.mutable_grad() = at::Tensor();
    if (!gradient.defined()) continue;
    const auto how = split.find(item.key());
    whole.mutable_grad() =
        how == split.end() ? gradient.clone() : joined_slices(gradient, how->second, rank, whole.size(how->second.dim));
  }
}

// Trains this rank's part of `start` in the same way, and compares everything.
inline void expect_trains_as_whole(const torch::nn::Sequential& start, const std::vector<TrainingBatch>& batches,
                                   const Trained& expected, TensorRule rule, Rank& rank) {
  torch::nn::Sequential part = shard(start, rank, rule);
  torch::optim::SGD sgd(part->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  torch::nn::Sequential joined = copy_of(start);
  joined->to(rank.device());
  for (size_t step = 0; step < batches.size(); ++step) {
    SCOPED_TRACE(testing::Message() << "step " << step);
    sgd.zero_grad();
    const at::Tensor x = batches[step].x.clone().to(rank.device()).requires_grad_();
    const at::Tensor result = part->forward(x);
    expect_near(result.detach(), expected.results[step], kTolerance, "result");
    torch::nn::functional::cross_entropy(result, batches[step].y.to(rank.device())).backward();
    expect_near(x.grad(), expected.input_gradients[step], kTolerance, "gradient of the input");
    unshard_gradients(part, rank, joined);
    const auto gradients = expected.gradients[step]->named_parameters();
    for (const auto& item : joined->named_parameters()) {
      expect_near(item.value().grad(), gradients[item.key()].grad(), kTolerance, item.key() + ".grad");
    }
    expect_whole_parameters_equal_on_all_ranks(part, rank);
    sgd.step();
  }
  unshard(part, rank, joined);
  const auto weights = expected.net->named_parameters(), buffers = expected.net->named_buffers();
  for (const auto& item : joined->named_parameters()) {
    expect_near(item.value().detach(), weights[item.key()].detach(), kTolerance, item.key());
    expect_equal_on_all_ranks(item.value(), rank, item.key());
  }
  for (const auto& item : joined->named_buffers()) {
    expect_near(item.value().to(torch::kDouble), buffers[item.key()].to(torch::kDouble), kTolerance, item.key());
  }
}

inline std::vector<TrainingBatch> batches_of(at::IntArrayRef sample, int64_t classes, int count = 3) {
  auto shape = sample.vec();
  shape.insert(shape.begin(), 5);
  std::vector<TrainingBatch> batches;
  for (int i = 0; i < count; ++i) {
    batches.push_back({torch::randn(shape, torch::kDouble), torch::randint(classes, {5})});
  }
  return batches;
}

inline void expect_sharded_trains_as_whole(torch::nn::Sequential net, at::IntArrayRef sample, int64_t classes,
                                           int world, TensorRule rule = TensorRule::channels) {
  net->to(torch::kDouble);
  const auto batches = batches_of(sample, classes);
  const Trained expected = train_whole(net, batches);
  run(test_devices(world), [&](Rank& rank) { expect_trains_as_whole(net, batches, expected, rule, rank); });
}

// A layer of which every rank keeps all: it takes whole inputs, and computes the same everywhere.
template <class Layer>
struct KeptImpl : torch::nn::Cloneable<KeptImpl<Layer>>, Shardable {
  explicit KeptImpl(Layer layer) : layer(std::move(layer)) { KeptImpl::reset(); }
  void reset() override {
    using Impl = typename Layer::ContainedType;
    layer = this->register_module("layer", Layer(std::dynamic_pointer_cast<Impl>(layer->clone())));
  }
  at::Tensor forward(const at::Tensor& x) { return layer->forward(x); }
  torch::nn::AnyModule shard(Rank& rank) const override {
    return torch::nn::AnyModule(std::static_pointer_cast<KeptImpl>(whole_copy(*this, rank)));
  }
  Layer layer;
};
template <class Layer>
std::shared_ptr<KeptImpl<Layer>> kept(const Layer& layer) {
  return std::make_shared<KeptImpl<Layer>>(layer);
}

// ---- Two nets ------------------------------------------------------------------------------------------------------

inline torch::nn::Sequential multilayer_perceptron() {
  return torch::nn::Sequential({{"fc1", torch::nn::Linear(7, 9)},
                                {"tanh1", torch::nn::Tanh()},
                                {"fc2", torch::nn::Linear(9, 8)},
                                {"tanh2", torch::nn::Tanh()},
                                {"fc3", torch::nn::Linear(8, 5)}});
}

inline torch::nn::Sequential lenet_of_layers() {
  return torch::nn::Sequential({{"conv1", ConvReluPool(1, 12, 3)},
                                {"conv2", ConvReluPool(12, 24, 3)},
                                {"flatten", torch::nn::Flatten()},
                                {"fc1", torch::nn::Linear(24 * 2 * 2, 10)},
                                {"relu", torch::nn::ReLU()},
                                {"fc2", torch::nn::Linear(10, 6)}});
}

}  // namespace lockstep
