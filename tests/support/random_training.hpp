// Random small nets, and what a training of them with a grain is to do: for tests that compare the bits of one training
// on many layouts of its ranks.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/nn/dropout.hpp>
#include <lockstep/ranks/rank.hpp>

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace lockstep {

// Some parameters are used by some samples alone, some twice, some never.
struct UnevenLayersImpl : torch::nn::Cloneable<UnevenLayersImpl> {
  explicit UnevenLayersImpl(int64_t width) : width(width) { reset(); }
  void reset() override {
    shared = register_module("shared", torch::nn::Linear(width, width));
    rare = register_module("rare", torch::nn::Linear(width, width));
    never = register_module("never", torch::nn::Linear(width, 2));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor h = torch::relu(shared(torch::relu(shared(x))));
    return x.flatten()[0].item<float>() > 0.6 ? h + rare(h) : h;  // by its first sample
  }
  int64_t width;
  torch::nn::Linear shared{nullptr}, rare{nullptr}, never{nullptr};
};
TORCH_MODULE(UnevenLayers);

// A BatchNorm of one channel, which normalises the values of a single sample too.
struct NormOfAllImpl : torch::nn::Cloneable<NormOfAllImpl> {
  NormOfAllImpl() { reset(); }
  void reset() override { norm = register_module("norm", torch::nn::BatchNorm1d(1)); }
  torch::Tensor forward(const torch::Tensor& x) { return norm(x.reshape({-1, 1})).view(x.sizes()); }
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(NormOfAll);

// Four to seven layers, from [n, 4] to [n, 3].
inline torch::nn::Sequential random_net(uint64_t seed) {
  std::mt19937_64 random(seed);
  torch::manual_seed(seed);
  const auto width = static_cast<int64_t>(3 + random() % 5);
  torch::nn::Sequential net;
  net->push_back("in", torch::nn::Linear(4, width));
  net->push_back("tanh", torch::nn::Tanh());
  net->push_back("uneven", UnevenLayers(width));
  if (random() % 2 == 0) net->push_back("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
  if (random() % 2 == 0) net->push_back("batch_norm", NormOfAll());
  if (random() % 2 == 0) net->push_back("dropout", Dropout(0.3));
  net->push_back("out", torch::nn::Linear(width, 3));
  return net;
}

inline Dataset random_samples(uint64_t seed, int64_t count) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return {torch::randn({count, 4}, generator), torch::randint(3, {count}, generator, torch::kLong)};
}

// This rank's part of a batch of random samples.
inline Batch batch_of(Rank& rank, int64_t size, int64_t grain) {
  return *batches(random_samples(1, size), {.size = size, .grain = grain}, rank).begin();
}

struct RandomTask {
  uint64_t seed = 1;
  int64_t batch = 20, grain = 3, count = 50;
  bool adam = true;
};

// Batches that grains do not divide, and a last one that is smaller than the others.
inline RandomTask random_task(uint64_t seed) {
  std::mt19937_64 random(seed);
  RandomTask task{.seed = seed};
  task.batch = static_cast<int64_t>(1 + random() % 24);
  const auto most_grains = static_cast<int64_t>(1 + random() % 12);
  task.grain = (task.batch + most_grains - 1) / most_grains;
  task.count = static_cast<int64_t>(task.batch + random() % 40);
  task.adam = random() % 2 == 0;
  return task;
}

inline std::string to_string(const RandomTask& task) {
  return "net " + std::to_string(task.seed) + ", batch " + std::to_string(task.batch) + ", grain " +
         std::to_string(task.grain) + ", samples " + std::to_string(task.count);
}

inline Optimizer::Make maker_of(const RandomTask& task) {
  return [adam = task.adam](auto groups) -> std::unique_ptr<torch::optim::Optimizer> {
    if (!adam) return std::make_unique<torch::optim::SGD>(groups, torch::optim::SGDOptions(0.1));
    return std::make_unique<torch::optim::AdamW>(groups, torch::optim::AdamWOptions(0.01));
  };
}

}  // namespace lockstep
