// Times what data parallelism costs and gains by itself: nets of LibTorch's own modules, a batch of 256. LibTorch alone
// on two intra-op threads and DataParallel on two CPU ranks of one thread take turns; the best of five rounds counts.
// Both have keep_freed_memory(). benchmarks/README.md has the command that builds it.
#include <lockstep/lockstep.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>

namespace nn = torch::nn;
using Clock = std::chrono::steady_clock;

nn::Sequential mlp() {
  return nn::Sequential(nn::Flatten(), nn::Linear(784, 1024), nn::ReLU(), nn::Linear(1024, 1024), nn::ReLU(),
                        nn::Linear(1024, 10));
}

nn::Sequential conv_net() {
  return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(1, 16, 5).padding(2)), nn::ReLU(), nn::MaxPool2d(2),
                        nn::Conv2d(nn::Conv2dOptions(16, 32, 5).padding(2)), nn::ReLU(), nn::MaxPool2d(2),
                        nn::Flatten(), nn::Linear(32 * 7 * 7, 10));
}

// Milliseconds per step. backward() computes the gradients of a batch.
double time_of_step(const std::vector<torch::Tensor>& parameters, const auto& backward) {
  torch::optim::SGD sgd(parameters, /*lr=*/0.01);
  auto start = Clock::now();
  for (int i = -10; i < 50; ++i) {  // the first ten warm up
    if (i == 0) start = Clock::now();
    sgd.zero_grad();
    backward();
    sgd.step();
  }
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count() / 50;
}

void compare(const char* name, nn::Sequential (*make)(), const torch::Tensor& x, const torch::Tensor& y) {
  double alone = 1e9, parallel = 1e9;
  for (int round = 0; round < 5; ++round) {
    auto whole = make();
    const auto backward = [&] { nn::functional::cross_entropy(whole->forward(x), y).backward(); };
    alone = std::min(alone, time_of_step(whole->parameters(), backward));
    lockstep::run(lockstep::parse_devices("2xcpu"), [&](lockstep::Rank& rank) {
      lockstep::DataParallel net(make(), rank);
      const lockstep::Batch part{x.chunk(2)[rank.index()], y.chunk(2)[rank.index()], x.size(0)};
      const auto part_backward = [&] { net.loss(part, nn::functional::cross_entropy).backward(); };
      const double time = time_of_step(net->parameters(), part_backward);
      if (rank.index() == 0) parallel = std::min(parallel, time);
    });
  }
  std::printf("%-8s LibTorch %.2f ms, DataParallel %.2f ms, ratio %.2f\n", name, alone, parallel, alone / parallel);
}

int main() {
  lockstep::keep_freed_memory();
  at::set_num_threads(2);
  const torch::Tensor x = torch::rand({256, 1, 28, 28}), y = torch::randint(10, {256}, torch::kLong);
  compare("MLP", mlp, x, y);
  compare("ConvNet", conv_net, x, y);
}
