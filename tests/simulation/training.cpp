#include "training.hpp"

#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>

#include "base/scramble.hpp"
#include "plan.hpp"

#include <cstring>

namespace lockstep::simulation {
namespace {

constexpr int64_t kIn = 6, kOut = 40;

// Its weights come from no generator: that is one for all simulated processes. It has one layer, since most of what a
// run takes is LibTorch's calls, and two would find no more.
struct Net : torch::nn::Module {
  Net() {
    w = register_parameter("w", torch::sin(torch::arange(kIn * kOut, torch::kFloat)).mul_(0.3).view({kIn, kOut}));
    b = register_parameter("b", torch::zeros({kOut}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return torch::addmm(b, x, w); }
  torch::Tensor w, b;
};

}  // namespace

uint64_t digest_of(const Parameters& parameters) {
  uint64_t digest = 0;
  for (const auto& [name, parameter] : parameters) {
    const auto* const data = static_cast<const char*>(parameter.const_data_ptr());
    for (size_t i = 0; i + 4 <= parameter.nbytes(); i += 4) {
      uint32_t word = 0;
      std::memcpy(&word, data + i, 4);
      digest = scramble(digest + word + kGolden);
    }
  }
  return digest;
}

// The first number of a sample is its own number.
Dataset training_set() {
  const int64_t count = kSteps * kBatch;
  auto x = torch::sin(torch::arange(count * kIn, torch::kFloat).mul_(0.7)).view({count, kIn});
  x.select(1, 0) = torch::arange(count, torch::kFloat);
  return {x, torch::cos(torch::arange(count * kOut, torch::kFloat).mul_(0.3)).view({count, kOut})};
}

void train(Rank& rank, const Dataset& data, Steps& steps, const Listener& listener) {
  DataParallel net(Net(), rank);
  Parameters parameters;
  for (const auto& item : net->named_parameters()) parameters.emplace_back(item.key(), item.value());
  torch::optim::SGD sgd(net->parameters(), /*lr=*/0.01);
  int step = 0;
  for (auto& batch : batches(data, {.size = kBatch, .seed = 5, .epoch = 1}, rank)) {
    if (!listener.before(step)) return;
    const auto numbers = batch.x.select(1, 0).to(torch::kLong).contiguous();
    batch.x.select(1, 0).mul_(0.01);
    sgd.zero_grad();
    net.loss(batch, [](const auto& out, const auto& y) { return torch::mse_loss(out, y); }).backward();
    sgd.step();
    steps.weights.push_back(digest_of(parameters));
    const auto* const first = numbers.const_data_ptr<int64_t>();
    steps.samples.emplace_back(first, first + numbers.numel());
    listener.after(step++, parameters);
  }
}

}  // namespace lockstep::simulation
