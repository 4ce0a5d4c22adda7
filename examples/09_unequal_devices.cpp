// Unequal devices: all wait for the slowest one at every step, so with equal parts of a batch a fast device idles. Give
// it more samples. The gradients stay those of the whole batch.
//
//   by hand    shares in any unit, as {3, 1}, if you know the devices.
//   Balance    measures what each rank computes while it trains, and moves samples until all take as long; also where a
//              device's speed changes because others use it too.
//
// So that the output is the same on every machine, the devices here are simulated ones: rank 1 takes three times as
// long for a sample as rank 0, by a clock that forward() moves on. Without .clock Balance takes the time that passes.
// lockstep train has --balance.
//
//   example_09_unequal_devices
//
// Expected output, in double precision (with CPU ranks, also where there are GPUs):
//
//   equal parts   32 + 32 samples at the end   9.60 simulated seconds  loss 0.318899
//   by hand       48 + 16 samples at the end   4.80 simulated seconds  loss 0.318899
//   Balance       48 + 16 samples at the end   5.28 simulated seconds  loss 0.318899
#include <lockstep/lab.hpp>
#include <lockstep/lockstep.hpp>

#include <cstdio>
#include <iostream>
#include <optional>

namespace {

using lockstep::Rank;
using torch::Tensor;
using torch::nn::Linear;
namespace F = torch::nn::functional;

constexpr int64_t kBatch = 64;

struct Net : torch::nn::Module {
  Net() { to(torch::kDouble); }
  Tensor forward(const Tensor& x) {
    seconds += seconds_per_sample * static_cast<double>(x.size(0));
    return output(torch::relu(hidden(x)));
  }

  Linear hidden = register_module("hidden", Linear(8, 64));
  Linear output = register_module("output", Linear(64, 4));
  double seconds = 0;  // the simulated clock
  double seconds_per_sample = 0;
};

// The same weights on every rank and in every run.
std::shared_ptr<Net> make_net(Rank& rank) {
  return rank.in_turn([&] {
    torch::manual_seed(1);
    auto net = std::make_shared<Net>();
    net->seconds_per_sample = rank.index() == 1 ? 0.003 : 0.001;
    return net;
  });
}

// The data: of eight numbers in [-1, 1], the signs of two products, which are four classes.
lockstep::Dataset make_data() {
  torch::manual_seed(2);
  const Tensor x = torch::rand({640, 8}, torch::kDouble) * 2 - 1;
  const auto positive = [&](int i, int j) { return (x.select(1, i) * x.select(1, j) > 0).to(torch::kLong); };
  return {x, positive(0, 1) + 2 * positive(2, 3)};
}

// With Balance `shares` are those of the first batches, until it has measured.
void train(const char* what, std::vector<double> shares, bool measured, Rank& rank, const lockstep::Dataset& data) {
  lockstep::DataParallel net(make_net(rank), rank);
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(/*lr=*/0.1).momentum(0.9));
  std::optional<lockstep::Balance> balance;
  if (measured) balance.emplace(net, rank, lockstep::BalanceOptions{.clock = [&] { return net->seconds; }});

  double seconds = 0;  // each step takes as long as its slowest rank
  for (int epoch = 0; epoch < 10; ++epoch) {
    auto batches = lockstep::batches(data, {.size = kBatch, .epoch = epoch, .shares = shares}, rank);
    for (auto& batch : batches) {
      Tensor step_seconds = torch::tensor(net->seconds_per_sample * static_cast<double>(batch.size()), torch::kDouble);
      sgd.zero_grad();
      net.loss(batch, F::cross_entropy).backward();
      sgd.step();
      if (balance && balance->step(batch, batches)) shares = balance->shares();
      rank.allreduce(step_seconds, c10d::ReduceOp::MAX);
      seconds += step_seconds.item<double>();
    }
  }
  if (rank.index() != 0) return;
  const auto first = static_cast<long>(kBatch * shares[0] / (shares[0] + shares[1]));
  const double loss = F::cross_entropy(net(data.x), data.y).item<double>();
  std::printf("%-12s  %2ld + %2ld samples at the end  %5.2f simulated seconds  loss %.6f\n", what, first,
              static_cast<long>(kBatch) - first, seconds, loss);
}

}  // namespace

int main() try {
  lockstep::keep_freed_memory();
  const lockstep::Dataset data = make_data();
  const lockstep::Devices two(2, torch::kCPU);
  lockstep::run(two, [&](Rank& rank) { train("equal parts", {1, 1}, false, rank, data); });
  lockstep::run(two, [&](Rank& rank) { train("by hand", {3, 1}, false, rank, data); });
  lockstep::run(two, [&](Rank& rank) { train("Balance", {1, 1}, true, rank, data); });
} catch (const lockstep::Error& error) {
  std::cerr << "error: " << error.what() << "\n";
  return 1;
}
