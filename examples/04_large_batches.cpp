// Larger batches: k devices can take k times the samples in a step, and an epoch then has k times fewer steps. What
// becomes of the learning rate, and what if so large a batch does not fit into memory?
//
//   scale       the learning rate is multiplied by k ("linear") or by sqrt(k): fewer steps, and longer ones.
//   warm up     a rate so large is reached by and by, over the first epochs; then a schedule lowers it again.
//   LARS, LAMB  where one large rate is too much for some layers: each layer moves by a share of its own size.
//   accumulate  a batch is computed in parts, one after the other, before one exchange and update: equal gradients.
//
// lockstep train has all of it as flags, and lockstep sweep compares rules: docs/large-batches.md.
//
//   example_04_large_batches
//
// Expected output, in double precision, so that the digits are the same on every machine (with CPU ranks, also where
// there are GPUs):
//
//     64 samples per step, lr 0.1                          1280 steps  loss 0.095254
//   1024 samples per step, lr 0.1                            80 steps  loss 0.450164
//   1024 samples per step, lr 1.6                            80 steps  loss 0.102199
//   1024 samples per step, lr 1.6, warm-up, cosine           80 steps  loss 0.058412
//   1024 samples per step, the same, in 4 parts              80 steps  loss 0.058412
//   1024 samples per step, LARS, lr 32, warm-up, cosine      80 steps  loss 0.096437
//   1024 samples per step, LAMB, lr 0.08, warm-up, cosine    80 steps  loss 0.059543
#include <lockstep/lab.hpp>
#include <lockstep/lockstep.hpp>

#include <cstdio>
#include <functional>
#include <iostream>

namespace {

using lockstep::LearningRate;
using lockstep::Rank;
using torch::Tensor;
using torch::nn::Linear;
namespace F = torch::nn::functional;

struct Net : torch::nn::Module {
  Net() { to(torch::kDouble); }
  Tensor forward(const Tensor& x) { return output(torch::relu(hidden(x))); }

  Linear hidden = register_module("hidden", Linear(8, 64));
  Linear output = register_module("output", Linear(64, 4));
};

// The same weights on every rank and in every run.
std::shared_ptr<Net> make_net(Rank& rank) {
  return rank.in_turn([] {
    torch::manual_seed(1);
    return std::make_shared<Net>();
  });
}

// The data: of eight numbers in [-1, 1], the signs of two products, which are four classes.
lockstep::Dataset make_data() {
  torch::manual_seed(2);
  const Tensor x = torch::rand({8192, 8}, torch::kDouble) * 2 - 1;
  const auto positive = [&](int i, int j) { return (x.select(1, i) * x.select(1, j) > 0).to(torch::kLong); };
  return {x, positive(0, 1) + 2 * positive(2, 3)};
}

// The gradients of the whole batch, `parts` times one after the other: only the last part's backward talks to the other
// ranks. A part counts by its share of the whole batch, and so keeps the whole batch's size.
void backward(lockstep::DataParallel<Net>& net, const lockstep::Batch& batch, int64_t parts) {
  const auto all = batch.in_parts(parts);
  {
    const auto alone = net.no_sync();
    for (size_t i = 0; i + 1 < all.size(); ++i) net.loss(all[i], F::cross_entropy).backward();
  }
  net.loss(all.back(), F::cross_entropy).backward();
}

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<Tensor>)>;

// Any torch::optim::Optimizer; its learning rate is set before every step.
void train(const char* what, const LearningRate& rate, const MakeOptimizer& make_optimizer, Rank& rank,
           const lockstep::Dataset& data, int64_t parts = 1) {
  rate.check();
  lockstep::DataParallel net(make_net(rank), rank);
  const auto optimizer = make_optimizer(net->parameters());
  int64_t steps = 0;
  for (int epoch = 0; epoch < rate.epochs; ++epoch) {
    auto batches = lockstep::batches(data, {.size = rate.batch, .epoch = epoch}, rank);
    for (auto& batch : batches) {
      const double epochs_done = static_cast<double>(steps++) / static_cast<double>(batches.count());
      lockstep::set_learning_rate(*optimizer, lockstep::learning_rate_at(rate, epochs_done));
      optimizer->zero_grad();
      backward(net, batch, parts);
      optimizer->step();
    }
  }
  if (rank.index() != 0) return;
  const double loss = F::cross_entropy(net(data.x), data.y).item<double>();
  std::printf("%4ld samples per step, %-30s  %4ld steps  loss %.6f\n", static_cast<long>(rate.batch), what,
              static_cast<long>(steps), loss);
}

void train_all(Rank& rank, const lockstep::Dataset& data) {
  const auto sgd = [](auto parameters) {
    return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(/*lr=*/0.1).momentum(0.9));
  };
  const auto lars = [](auto parameters) {
    return std::make_unique<lockstep::Lars>(parameters, lockstep::LarsOptions(/*lr=*/1));
  };
  const auto lamb = [](auto parameters) { return std::make_unique<lockstep::Lamb>(parameters); };

  const LearningRate small{.lr = 0.1, .batch = 64, .reference_batch = 64, .epochs = 10};
  LearningRate large = small;  // 16 times the batch
  large.batch = 1024;
  LearningRate scaled = large;
  scaled.scaling = LearningRate::Scaling::linear;
  LearningRate warmed_up = scaled;
  warmed_up.warmup_epochs = 2;
  warmed_up.schedule = LearningRate::Schedule::cosine;

  train("lr 0.1", small, sgd, rank, data);
  train("lr 0.1", large, sgd, rank, data);
  train("lr 1.6", scaled, sgd, rank, data);
  train("lr 1.6, warm-up, cosine", warmed_up, sgd, rank, data);
  train("the same, in 4 parts", warmed_up, sgd, rank, data, /*parts=*/4);
  LearningRate layerwise = warmed_up;
  layerwise.lr = 2;
  train("LARS, lr 32, warm-up, cosine", layerwise, lars, rank, data);
  layerwise.lr = 0.02;
  layerwise.scaling = LearningRate::Scaling::sqrt;
  train("LAMB, lr 0.08, warm-up, cosine", layerwise, lamb, rank, data);
}

}  // namespace

int main() try {
  lockstep::keep_freed_memory();
  const lockstep::Dataset data = make_data();
  lockstep::run(lockstep::Devices(2, torch::kCPU), [&](Rank& rank) { train_all(rank, data); });
} catch (const lockstep::Error& error) {
  std::cerr << "error: " << error.what() << "\n";
  return 1;
}
